//! The bytes that a model's lookup experts hold and read, as `export` and `ledger` show them.

use fastweight::models::LayerExperts;
use serde::Serialize;

/// Bytes of one layer's lookup experts.
#[derive(Debug, Clone, Serialize)]
pub struct Layer {
    layer: usize,
    experts: usize,
    #[serde(flatten)]
    bytes: Sum,
}

/// Bytes of both forms.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Sum {
    /// What one token reads of the networks: all their weights.
    pub networks_bytes_per_token: u128,
    /// What one token reads of the tables: a row for each expert.
    pub tables_bytes_per_token: u128,
    /// What the networks hold.
    pub networks_bytes: u128,
    /// What the tables hold.
    pub tables_bytes: u128,
}

impl Sum {
    /// How many times less one token reads of the tables.
    pub fn ratio(&self) -> f64 {
        self.networks_bytes_per_token as f64 / self.tables_bytes_per_token as f64
    }
}

/// Bytes of all lookup experts of a model.
#[derive(Debug, Clone, Serialize)]
pub struct Experts {
    /// How the model at hand has them: `networks`, `tables`, or `both` where layers differ.
    pub form: &'static str,
    /// All layers together.
    #[serde(flatten)]
    pub sum: Sum,
    layers: Vec<Layer>,
}

impl Experts {
    /// The layers with lookup experts, their bytes `scaled` to the size of a number; none for a model without.
    pub fn of(layers: &[LayerExperts], scaled: impl Fn(usize) -> u128) -> Option<Self> {
        let form = match layers.iter().filter(|layer| layer.are_tables).count() {
            _ if layers.is_empty() => return None,
            0 => "networks",
            tables if tables == layers.len() => "tables",
            _ => "both",
        };
        let layer = |of: &LayerExperts| {
            let bytes = Sum {
                networks_bytes_per_token: scaled(of.networks.per_token),
                tables_bytes_per_token: scaled(of.tables.per_token),
                networks_bytes: scaled(of.networks.stored),
                tables_bytes: scaled(of.tables.stored),
            };
            Layer { layer: of.layer, experts: of.experts, bytes }
        };
        let layers: Vec<Layer> = layers.iter().map(layer).collect();
        let sum = layers.iter().fold(Sum::default(), |sum, Layer { bytes, .. }| Sum {
            networks_bytes_per_token: sum.networks_bytes_per_token + bytes.networks_bytes_per_token,
            tables_bytes_per_token: sum.tables_bytes_per_token + bytes.tables_bytes_per_token,
            networks_bytes: sum.networks_bytes + bytes.networks_bytes,
            tables_bytes: sum.tables_bytes + bytes.tables_bytes,
        });
        Some(Self { form, sum, layers })
    }

    /// Rows of a table: layer, experts, bytes read and held; all layers last.
    pub fn rows(&self, bytes: impl Fn(u128) -> String) -> Vec<[String; 6]> {
        let row = |layer: String, experts: String, sum: &Sum| {
            let [a, b, c, d] = [
                sum.networks_bytes_per_token,
                sum.tables_bytes_per_token,
                sum.networks_bytes,
                sum.tables_bytes,
            ]
            .map(&bytes);
            [layer, experts, a, b, c, d]
        };
        let layers = self.layers.iter();
        let mut rows: Vec<_> =
            layers.map(|of| row(of.layer.to_string(), of.experts.to_string(), &of.bytes)).collect();
        rows.push(row("all".into(), String::new(), &self.sum));
        rows
    }
}
