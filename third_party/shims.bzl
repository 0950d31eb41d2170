"""Stand-ins for the repositories that an offline Bazel 4 expects and that Debian does not ship with it.

Debian's build of Bazel 4.2.3 reports an empty version. On any newer Bazel the real repositories come with Bazel itself, and
this macro does nothing.
"""

_SHIMS = ["rules_cc", "rules_java", "remote_coverage_tools"]

def offline_bazel_shims():
    """Declares the stand-ins; must be the first thing in WORKSPACE."""
    version = native.bazel_version
    if version != "" and not version.startswith("4."):
        return
    for name in _SHIMS:
        native.local_repository(
            name = name,
            path = "third_party/" + name,
        )
