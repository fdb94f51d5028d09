"""Reinforcement learning of a language model whose answers a vLLM server generates, by TRL's GRPOTrainer.

    booster run --nproc-per-node 4 train.py --tp 2 --pp 2
    booster run --nproc-per-node 2 train.py --pp 2 --tiny          # without a server and a download, in seconds

The server runs on GPUs of its own, and gets the weights before it generates. It starts by

    VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --weight-transfer-config '{"backend": "nccl"}' \\
        --logprobs-mode processed_logprobs --max-logprobs -1

The job is in `grpo.py`. All options of TRL's `GRPOConfig` work: `--vllm_server_base_url http://host:8000`, ...
"""

from grpo import main

if __name__ == "__main__":
    main(__doc__, output_dir="runs/grpo_vllm", use_vllm=True, vllm_mode="server", vllm_server_timeout=600.0)
