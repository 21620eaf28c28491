"""The real engine: vLLM in this process, on CPU or GPU. The only package that imports vllm."""
