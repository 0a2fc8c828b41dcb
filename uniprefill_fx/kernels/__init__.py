"""Device kernels (Triton), one file or folder an op, each beside its naive torch twin of the same signature.

The folder lies inside the package because a top-level folder `kernels/`, even one without an `__init__.py`, becomes
importable as `kernels` whenever Python runs from the repository root. That name belongs to a Hugging Face package
that transformers looks up.
"""
