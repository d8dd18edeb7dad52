"""The serving path of GPUs, in the real engine, on a CPU.

vLLM's model runner V2 and its Triton attention run here in Triton's interpreter, with
asynchronous scheduling; so do our scheduler, worker and attention backend for GPUs. What takes
a real GPU (CUDA graphs, streams, NCCL, speed) is left to `scripts/gpu_check.py`.
"""
