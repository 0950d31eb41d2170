"""The names that Bazel's own files load from rules_java, bound to the rules that are built into Bazel 4."""

java_binary = native.java_binary
java_import = native.java_import
java_library = native.java_library
java_runtime = native.java_runtime
java_toolchain = native.java_toolchain
