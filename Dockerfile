# An image with this program, its requirements and the command finetune, for CPUs or for CUDA:
#   docker build --build-arg DEVICE=cpu  -t finetune:cpu .
#   docker build --build-arg DEVICE=cuda -t finetune:cuda .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD:/work" -w /work finetune:cuda finetune train --dataset my.jsonl
# torch's wheels bring their own CUDA libraries, so the base is the same for both; the driver is the host's.
FROM python:3.12-slim-bookworm

ARG DEVICE=cpu
# A C compiler for Triton's kernels, git for Hub revisions, and nothing of the build that is not used.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/finetune
COPY requirements.txt ./
RUN case "$DEVICE" in \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        cuda) index=https://pypi.org/simple ;; \
        *) echo "DEVICE $DEVICE: is neither cpu nor cuda." >&2; exit 2 ;; \
    esac \
    && torch="$(grep '^torch' requirements.txt)" \
    && pip install --no-cache-dir --index-url "$index" "$torch" \
    && pip install --no-cache-dir -r requirements.txt

COPY . .
RUN pip install --no-cache-dir --no-deps . \
    && useradd --create-home --uid 1000 finetune
USER finetune
# Models and probes are kept here: mount a volume to keep them between containers.
ENV HF_HOME=/home/finetune/.cache/huggingface
VOLUME /home/finetune/.cache
CMD ["finetune", "--help"]
