"""`planted_bug`: a shipped test with a shipped kernel file, as it is and with a bug of planted_bugs.toml."""

load("//csrc/testing:emulated.bzl", "emulated_cuda_library")

# Names of a sanitizer, as in planted_bugs.toml, to what the kernel, the emulator and the link need.
SANITIZERS = {
    "address": ["-fsanitize=address"],
    "undefined": [
        "-fsanitize=undefined",
        "-fno-sanitize-recover=undefined",
    ],
}

# Kernel files, and the shipped tests of them.
_TESTS = {
    "//csrc/loss:logits_threshold": "//csrc/loss:logits_threshold_emulated_test",
    "//csrc/loss:policy_loss": "//csrc/loss:policy_loss_emulated_test",
    "//csrc/loss:row_stats": "//csrc/loss:row_stats_cuda_emulated_test",
    "//csrc/refit:pack": "//csrc/refit:pack_emulated_test",
}

# These builds bring their own sanitizer.
_TAGS = ["no-sanitizer"]

def planted_bug(name, kernel, sanitizer = None):
    """Two binaries: `name` with the bug, `name`_without.

    Args:
      name: of the bug in the table.
      kernel: a key of _TESTS. Both binaries link the shipped library of that name too, for its headers and what else
        the test wants; the file's own objects come first and leave nothing of it to take.
      sanitizer: a key of SANITIZERS.
    """
    src = kernel + "_cuda.cu"
    native.genrule(
        name = name + "_plant",
        srcs = [
            src,
            "planted_bugs.toml",
        ],
        outs = [name + ".cu"],
        cmd = "$(execpath plant) --table $(execpath planted_bugs.toml) --bug %s --source $(execpath %s) > $@" % (name, src),
        tools = ["plant"],
    )
    for binary, file in [(name, name + ".cu"), (name + "_without", src)]:
        emulated_cuda_library(
            name = binary + "_kernels",
            srcs = [file],
            sanitizer = sanitizer,
            tags = _TAGS,
            alwayslink = True,
            deps = [kernel + "_emulated"],
        )
        native.cc_binary(
            name = binary,
            testonly = True,
            linkopts = SANITIZERS[sanitizer] if sanitizer else [],
            linkstatic = True,
            tags = _TAGS,
            deps = [
                ":%s_kernels" % binary,
                _TESTS[kernel] + "_cases",
            ],
        )
