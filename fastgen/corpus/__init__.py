"""Many texts in, many texts out: what `fastgen generate`, the Ray actors and the benchmarks of whole corpora share.

models      a model and its tokenizer, from a folder
texts       texts -> tokens -> generate -> texts; one that cannot be generated is a problem of its own
"""
