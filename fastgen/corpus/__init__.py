"""Many texts in, many texts out: what `fastgen generate`, the Ray actors and the benchmarks of whole corpora share.

models      a model and its tokenizer, from a folder
texts       texts -> tokens -> generate -> texts; one that cannot be generated is a problem of its own
records     what sources yield and sinks make
job         a whole corpus: what is asked for, and the run of it
blocks      records in a row, which are written, lost and made again as a whole
pipeline    reading ahead, generating, writing behind
worker      makes blocks of outputs of blocks of records
workers     several processes that do, on one machine
journal     which blocks are there, on disk
progress, summary, identity   what is shown, what is told in the end, what tells inputs and models apart
"""
