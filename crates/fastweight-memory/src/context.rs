//! Where a layer stands in its model.

use crate::MemoryError;

/// Most channels of a layer's input and output.
pub const MOST_WIDTH: usize = 1_000_000;
/// Most layers of a model.
pub const MOST_LAYERS: usize = 4096;
/// Most key channels, or value channels, of all heads together.
pub const MOST_HEAD_CHANNELS: usize = 1 << 22;
/// Most tokens that a short convolution reads.
pub(crate) const MOST_CONV_WIDTH: usize = 1024;
/// Most tokens that an attention window holds.
pub(crate) const MOST_WINDOW: usize = 1 << 36;

/// Geometry of a layer and its place in the model: everything a configuration needs besides its own options.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerContext {
    /// Channels of the layer's input and output.
    pub width: usize,
    /// Heads (query heads for softmax attention).
    pub heads: usize,
    /// Key and query channels of a head, K.
    pub head_dim: usize,
    /// Value channels of a head, V.
    pub value_dim: usize,
    /// Index of the layer in the model, from 0.
    pub layer: usize,
    /// Layers of the model.
    pub layers: usize,
    /// Added to the mean square in every RMS normalisation.
    pub norm_eps: f64,
    /// Hidden channels of the channel mixers; each kind has its own default when absent.
    pub mlp_hidden: Option<usize>,
    /// Tokens of the model's vocabulary; 0 for a layer that stands alone.
    pub vocab: usize,
    /// Seed of the layer's initial weights when it is built alone.
    pub seed: u64,
}

impl LayerContext {
    /// A layer that stands alone: K = V = `width / heads` (at least 1), seed 0, `norm_eps` 1e-5.
    pub fn new(width: usize, heads: usize) -> Self {
        let head_dim = (width / heads.max(1)).max(1);
        Self {
            width,
            heads,
            head_dim,
            value_dim: head_dim,
            layer: 0,
            layers: 1,
            norm_eps: 1e-5,
            mlp_hidden: None,
            vocab: 0,
            seed: 0,
        }
    }

    /// Channels of all keys, `heads * head_dim`.
    pub fn key_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of all values, `heads * value_dim`.
    pub fn value_width(&self) -> usize {
        self.heads * self.value_dim
    }

    /// Checks that no size is beyond what sizes are computed with, so that no product of them overflows.
    ///
    /// # Errors
    /// [`MemoryError::Setting`] names the size and what to change.
    pub(crate) fn validate_bounds(&self, layer: &'static str) -> Result<(), MemoryError> {
        for (setting, value, most) in
            [("width", self.width, MOST_WIDTH), ("layers", self.layers, MOST_LAYERS)]
        {
            if value > most {
                return Err(setting_error(layer, setting, value, format!("at most {most}")));
            }
        }
        for (setting, value) in [("head_dim", self.head_dim), ("value_dim", self.value_dim)] {
            if self.heads.checked_mul(value).is_none_or(|channels| channels > MOST_HEAD_CHANNELS) {
                let expected = format!("at most {MOST_HEAD_CHANNELS} channels in all {} heads", self.heads);
                return Err(setting_error(layer, setting, value, expected));
            }
        }
        Ok(())
    }

    /// Checks that no size is zero or beyond its bound and the layer lies inside the model.
    ///
    /// # Errors
    /// [`MemoryError::Setting`] names the size and what to change.
    pub fn validate(&self, layer: &'static str) -> Result<(), MemoryError> {
        let sizes = [
            ("width", self.width),
            ("heads", self.heads),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
            ("layers", self.layers),
        ];
        for (setting, value) in sizes {
            if value == 0 {
                return Err(setting_error(layer, setting, 0, "at least 1"));
            }
        }
        self.validate_bounds(layer)?;
        if self.layer >= self.layers {
            return Err(setting_error(layer, "layer", self.layer, format!("below layers = {}", self.layers)));
        }
        if !(self.norm_eps > 0.0 && self.norm_eps.is_finite()) {
            return Err(setting_error(
                layer,
                "norm_eps",
                self.norm_eps,
                "a small number above 0, such as 1e-5",
            ));
        }
        Ok(())
    }

    /// [`LayerContext::validate`], and an even `head_dim`, which rotary positions need.
    pub(crate) fn validate_rotary(&self, layer: &'static str, base: f32) -> Result<(), MemoryError> {
        self.validate(layer)?;
        if !self.head_dim.is_multiple_of(2) {
            let expected = "an even number, because rotary positions turn pairs of channels; change head_dim, or heads so that width / heads is even";
            return Err(setting_error(layer, "head_dim", self.head_dim, expected));
        }
        if !(base > 1.0 && base.is_finite()) {
            return Err(setting_error(layer, "rope_base", base, "a number above 1, such as 10000"));
        }
        Ok(())
    }
}

/// [`MemoryError::Setting`] from displayable parts.
pub(crate) fn setting_error(
    layer: &'static str,
    setting: &'static str,
    found: impl ToString,
    expected: impl Into<String>,
) -> MemoryError {
    MemoryError::Setting { layer, setting, found: found.to_string(), expected: expected.into() }
}

/// Largest rate of an inner step: beyond it no memory stays finite.
pub(crate) const MOST_RATE: f64 = 1e3;

/// Checks the largest rate of a memory's inner steps.
pub(crate) fn validate_rate(
    layer: &'static str,
    setting: &'static str,
    rate: impl Into<f64> + ToString,
    usual: &str,
) -> Result<(), MemoryError> {
    let found = rate.to_string();
    if (f64::MIN_POSITIVE..=MOST_RATE).contains(&rate.into()) {
        return Ok(());
    }
    Err(setting_error(
        layer,
        setting,
        found,
        format!("a number above 0 and at most {MOST_RATE}, such as {usual}"),
    ))
}

/// Checks a short convolution's width: 0 for none, or 2 to [`MOST_CONV_WIDTH`].
pub(crate) fn validate_conv(layer: &'static str, conv_width: usize) -> Result<(), MemoryError> {
    if conv_width == 1 || conv_width > MOST_CONV_WIDTH {
        let expected =
            format!("0 for no convolution, or at least 2 (4 is usual) and at most {MOST_CONV_WIDTH}");
        return Err(setting_error(layer, "conv_width", conv_width, expected));
    }
    Ok(())
}
