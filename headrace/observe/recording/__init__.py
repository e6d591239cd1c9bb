"""An engine's life on file: every way in and every step with its events, enough to live it again without a model."""
