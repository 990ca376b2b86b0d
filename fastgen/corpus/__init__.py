"""Many texts in, many texts out: shared by `fastgen generate`, the Ray actors and the benchmarks.

models             a model and its tokenizer, from a folder
texts              texts -> tokens -> generate -> texts; each text may fail by itself
languages          the first tokens of outputs, by their names
limits             length limits of outputs
formats.records    what sources yield and sinks write
formats.readers    records from files
formats.writers    outputs to files
formats.formats    rows of each file format
run.job            a whole corpus: the job and its run
run.blocks         consecutive records, which are written, lost and generated again together
run.pipeline       threads that read ahead, generate, and write
run.worker         generates blocks of outputs from blocks of records
run.workers        several worker processes on one machine
run.journal        record on disk of the finished blocks
run.progress       progress display
run.summary        summary of a run
run.identity       digests that identify inputs and models
"""
