"""Benchmarks of fastgen against the unpatched toolkits and CTranslate2; see README.md."""
