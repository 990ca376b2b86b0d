"""Many texts in, many texts out: what `fastgen generate`, the Ray actors and the benchmarks of whole corpora share.

models      a model and its tokenizer, from a folder
texts       texts -> tokens -> generate -> texts; one that cannot be generated is a problem of its own
records     what sources yield and sinks make
job         a whole corpus: what is asked for, and the run of it
blocks      records in a row, which are written, lost and made again as a whole
pipeline    reading ahead, generating, writing behind
worker      what one process does with its blocks
journal     which blocks lie where, on disk
assembly    what runs have left beside an output, and the output made of it
lead        what a run depends on, its beginning and its end
workers     several processes, started here or by torchrun; claims, store: how they share the work
progress, summary, identity   what is shown, what is told in the end, what tells inputs and models apart
"""
