"""Classes of answers by their length."""

#: Lower bounds of the output-length classes, in tokens. Fixed, so that runs and servers compare.
LENGTH_CLASS_BOUNDS = (1, 16, 64, 256, 1024)


def length_class(output_tokens: int) -> int:
    """Index into LENGTH_CLASS_BOUNDS."""
    return max(sum(output_tokens >= bound for bound in LENGTH_CLASS_BOUNDS) - 1, 0)


def length_class_name(index: int) -> str:
    low = LENGTH_CLASS_BOUNDS[index]
    return f"{low}-{LENGTH_CLASS_BOUNDS[index + 1] - 1}" if index + 1 < len(LENGTH_CLASS_BOUNDS) else f"{low}+"
