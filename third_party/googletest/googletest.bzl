"""The repository rule `googletest`: the copy of the operating system, which only the tests under //csrc use."""

_INCLUDES = ["/usr/include", "/usr/local/include"]
_LIBRARIES = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/local/lib64"]

_BUILD = """\
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "gtest_main",
    srcs = [
        "lib/libgtest_main.a",
        "lib/libgtest.a",
    ],
    hdrs = ["include/gtest"],
    includes = ["include"],
    linkopts = ["-pthread"],
)
"""

def _first_with(rctx, folders, name):
    for folder in folders:
        if rctx.path(folder + "/" + name).exists:
            return folder
    fail("googletest was not found (no %s in %s); the tests under //csrc need it: apt-get install libgtest-dev" % (name, ", ".join(folders)))

def _googletest_impl(rctx):
    rctx.symlink(_first_with(rctx, _INCLUDES, "gtest/gtest.h") + "/gtest", "include/gtest")
    folder = _first_with(rctx, _LIBRARIES, "libgtest.a")
    for name in ["libgtest.a", "libgtest_main.a"]:
        rctx.symlink(folder + "/" + name, "lib/" + name)
    rctx.file("BUILD.bazel", _BUILD)

googletest = repository_rule(implementation = _googletest_impl, local = True)
