"""Models by name or path: built-in ones, made on first use and kept in a cache, and the user's own.

Importing this loads neither torch nor a model.
"""

from paceline.cluster.models.cache import default_cache_dir
from paceline.cluster.models.catalog import (
    BUILT_IN,
    BuiltIn,
    cached_path,
    get_model,
    is_cached,
    resolve_model,
)

__all__ = [
    "BUILT_IN",
    "BuiltIn",
    "cached_path",
    "default_cache_dir",
    "get_model",
    "is_cached",
    "resolve_model",
]
