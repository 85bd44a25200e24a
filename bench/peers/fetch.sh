#!/usr/bin/env bash
# fetch.sh: puts FlashAttention 3 and the write kernels of vLLM's wheel into .peers/run, where fa3.py and vllm_write.py look.
#
# vLLM itself is not installed. The kernels need the PyTorch that the wheel was built with: 2.11, CUDA 13.0. Packed copies stay
# in .peers/, small enough to carry to a machine without a network (tools/gpu_steps.sh and bench/run_all.sh unpack them there).
# They are third-party binaries, and not for a commit: .gitignore has .peers/.
set -euo pipefail
cd "$(dirname "$0")/../.."
libraries=(_vllm_fa3_C.abi3.so _C_stable_libtorch.abi3.so)

mkdir -p .peers/wheel .peers/run
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --dest .peers/wheel vllm==0.26.0
unzip -qoj .peers/wheel/vllm-0.26.0*.whl "vllm/vllm_flash_attn/${libraries[0]}" "vllm/${libraries[1]}" -d .peers/run
unzip -qoj .peers/wheel/vllm-0.26.0*.whl vllm/vllm_flash_attn/flash_attn_interface.py -d .peers
rm -r .peers/wheel
for library in "${libraries[@]}"; do
    xz -T0 -6 -kc ".peers/run/$library" >".peers/$library.xz"
done
ls -lh .peers .peers/run
