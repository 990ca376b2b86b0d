"""Model execution: routed modules, fused decode steps and encoders, CUDA graphs, and memory."""
