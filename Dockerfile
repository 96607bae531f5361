# docker build --build-arg TORCH_INDEX=CPU_INDEX -t rlhf .     (README.md says what CPU_INDEX is)
# docker run -v "$PWD/artifacts:/rlhf/artifacts" rlhf          runs the three stages; any other rlhf command: docker run rlhf --help
FROM python:3.12-slim
WORKDIR /rlhf
COPY . .
ARG TORCH_INDEX=
RUN if [ -n "$TORCH_INDEX" ]; then \
        pip install --no-cache-dir --no-deps -c constraints.txt --index-url "$TORCH_INDEX" torch; fi \
    && pip install --no-cache-dir -c constraints.txt -e .
ENTRYPOINT ["rlhf"]
CMD ["pipeline", "configs/support"]
