# In a vLLM branch: vllm/model_executor/layers/mamba/gdn/ops.
"""Arithmetic on tensors.  Imports neither vLLM nor a GPU library."""
