"""Benchmarks of fastgen against the unpatched toolkit and against CTranslate2; see README.md."""
