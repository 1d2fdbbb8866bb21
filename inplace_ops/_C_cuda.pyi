cuda_version: int
cuda_architectures: str
