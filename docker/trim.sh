#!/bin/sh
# Removes from the virtual environment what no server uses, and makes bytecode: `sh trim.sh`, in docker/Dockerfile only.
set -eu
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# jax declares scipy and imports it only in functions that the server does not call.
pip uninstall --quiet --yes scipy
find "$packages" -type d -name tests -prune -exec rm -r {} +

# Containers may have a read-only root, so bytecode is made here; not that of packages that few servers import, such as
# transformers, whose converter of tokenizers is for checkpoints without tokenizer.json.
python -m compileall -q -j 0 -x '/(transformers|orbax|pygments|pip|setuptools|tests?)/' "$packages"

# Nothing is installed after this.
pip uninstall --quiet --yes setuptools pip

# Symbol tables for debuggers.
for package in jaxlib jax_plugins jax_cuda13_plugin libtpu tensorstore uvloop; do
    find "$packages" -path "$packages/$package/*.so" -exec strip --strip-unneeded {} +
done

# NVIDIA's packages hold compilers for CUDA C++ and what these read. XLA and Pallas need ptxas, nvlink and libdevice.
# cuSOLVER's library for several GPUs, cuFFT's for FFTW and NVSHMEM's and NCCL's code for kernels that communicate are
# loaded by nothing; jax itself loads all others, at its start or through one another.
nvidia=$packages/nvidia
if [ -d "$nvidia" ]; then
    find "$nvidia" \( -name '*.a' -o -name '*.bc' -not -name 'libdevice*' -o -name '*.ltoir' \) -delete
    find "$nvidia" -mindepth 2 -maxdepth 2 \( -name include -o -name cccl \) -exec rm -r {} +
    find "$nvidia"/cu*/bin -mindepth 1 -maxdepth 1 -not -name ptxas -not -name nvlink -not -name fatbinary -exec rm -r {} +
    rm -r "$nvidia"/cu*/nvvm/bin
    rm "$nvidia"/cu*/lib/libnvvm.so.* "$nvidia"/cu*/lib/libcusolverMg.so.* "$nvidia"/cu*/lib/libcufftw.so.*
fi
