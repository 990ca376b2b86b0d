"""Pure tensor functions: a reference, a fast path and the dispatch between them.

This package keeps no state and knows no toolkit or model.
"""
