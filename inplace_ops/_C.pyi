built_with_torch: str
