"""Pure tensor functions: a reference, a fast path and the choice between them. No state, no toolkit, no model."""
