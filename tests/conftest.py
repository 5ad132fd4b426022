"""Checks the shapes in signatures while the tests run."""

from jaxtyping import install_import_hook

MODULES = "core.objectives core.sampling models.attention models.distribution models.qwen3 utils.batching"
install_import_hook(MODULES.split(), "beartype.beartype")
