//! Fastweight.
