"""The repository rule `cuda_toolkit`: finds nvcc in CUDA_HOME, on PATH or in /usr/local/cuda; empty when there is none.

The nvcc that is found may be a wrapper script, so the toolkit's root is what nvcc itself reports.
"""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = {headers},
    includes = {headers},
)

cc_library(
    name = "cudart_static",
    srcs = {libraries},
    linkopts = {linkopts},
    deps = [":headers"],
)
"""

def _find_nvcc(rctx):
    home = rctx.os.environ.get("CUDA_HOME")
    if home:
        nvcc = rctx.path(home + "/bin/nvcc")
        if not nvcc.exists:
            fail("CUDA_HOME=%s has no bin/nvcc; unset it or point it at a CUDA toolkit" % home)
        return nvcc
    nvcc = rctx.which("nvcc")
    if nvcc:
        return nvcc
    usual = rctx.path("/usr/local/cuda/bin/nvcc")
    return usual if usual.exists else None

def _find_root(rctx, nvcc):
    result = rctx.execute([nvcc, "--dryrun", "-c", "probe.cu"])
    for line in result.stderr.splitlines():
        if line.startswith("#$ TOP="):
            return rctx.path(line[len("#$ TOP="):].strip())
    fail("%s --dryrun does not say where its toolkit is:\n%s" % (nvcc, result.stderr))

def _cuda_toolkit_impl(rctx):
    nvcc = _find_nvcc(rctx)
    if not nvcc:
        rctx.file("BUILD.bazel", _BUILD.format(headers = "[]", libraries = "[]", linkopts = "[]"))
        rctx.file("toolkit.bzl", "NVCC = None\n")
        return
    root = _find_root(rctx, nvcc)
    rctx.symlink(root.get_child("include"), "include")
    for folder in ["lib64", "targets/x86_64-linux/lib", "lib"]:
        runtime = rctx.path("%s/%s/libcudart_static.a" % (root, folder))
        if runtime.exists:
            rctx.symlink(runtime, "libcudart_static.a")
            break
    if not rctx.path("libcudart_static.a").exists:
        fail("the CUDA toolkit in %s has no libcudart_static.a; install its runtime development package" % root)
    rctx.file("BUILD.bazel", _BUILD.format(
        headers = '["include"]',
        libraries = '["libcudart_static.a"]',
        linkopts = '["-ldl", "-lrt", "-lpthread"]',
    ))
    rctx.file("toolkit.bzl", 'NVCC = "%s"\n' % nvcc)

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    environ = ["CUDA_HOME", "PATH"],
    local = True,
)
