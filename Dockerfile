# llmfoundry with the versions of constraints.txt, for GPUs: PyTorch's wheels bring CUDA, so that the
# machine needs a driver alone. For launch=kubernetes, Slurm's pyxis, or by hand:
#
#     docker build -t llmfoundry .
#     docker run --gpus all --ipc=host -v "$PWD/runs:/work/runs" llmfoundry train quickstart
FROM python:3.11-slim-bookworm

# torch.compile and Triton call a C++ compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 llmfoundry \
    && install -d -o llmfoundry -g llmfoundry /work

WORKDIR /src
COPY constraints.txt ./
# First what changes seldom, and is large.
RUN pip install --no-cache-dir -c constraints.txt torch
COPY . .
# Stores, data sets, quantization; the wheel carries scripts, recipes and gauntlets.
RUN pip install --no-cache-dir -c constraints.txt ".[data,s3,codecs,lowp,peft,tiktoken,tensorboard]"

USER 1000:1000
WORKDIR /work
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["llmfoundry"]
CMD ["--help"]
