"""`tandem_wheel`: the installable package, with the Python modules, the native libraries and the configurations."""

def _place_of(file, folder):
    return "%s/%s" % (folder, file.basename) if folder else file.short_path

def _tandem_wheel_impl(ctx):
    placed = [(file, "") for file in depset(transitive = [dep[PyInfo].transitive_sources for dep in ctx.attr.deps]).to_list()]
    for target, folder in ctx.attr.data.items():
        placed += [(file, folder) for file in target.files.to_list()]

    files = ctx.actions.declare_file(ctx.label.name + ".files")
    lines = ["%s\t%s" % (file.path, _place_of(file, folder)) for file, folder in placed]
    ctx.actions.write(files, "\n".join(lines) + "\n")

    name = "%s-%s-%s.whl" % (ctx.attr.distribution, ctx.attr.version, ctx.attr.tag)
    wheel = ctx.actions.declare_file(name)
    arguments = ctx.actions.args()
    arguments.add("--pyproject", ctx.file.pyproject)
    arguments.add("--license", ctx.file.license)
    inputs = [ctx.file.pyproject, ctx.file.license, files]
    if ctx.file.readme:
        arguments.add("--readme", ctx.file.readme)
        inputs.append(ctx.file.readme)
    arguments.add("--files", files)
    arguments.add("--tag", ctx.attr.tag)
    arguments.add("--output", wheel)
    ctx.actions.run(
        outputs = [wheel],
        inputs = inputs + [file for file, _ in placed],
        executable = ctx.executable._tool,
        arguments = [arguments],
        mnemonic = "Wheel",
        progress_message = "Packing " + name,
    )
    return [DefaultInfo(files = depset([wheel]), runfiles = ctx.runfiles([wheel]))]

tandem_wheel = rule(
    implementation = _tandem_wheel_impl,
    attrs = {
        "data": attr.label_keyed_string_dict(
            allow_files = True,
            doc = "Other files, and the folder of the wheel that they go to.",
        ),
        "deps": attr.label_list(
            providers = [PyInfo],
            doc = "Python libraries; all that they depend on goes in.",
        ),
        "distribution": attr.string(mandatory = True),
        "license": attr.label(allow_single_file = True, mandatory = True),
        "pyproject": attr.label(allow_single_file = True, mandatory = True),
        "readme": attr.label(allow_single_file = True),
        "tag": attr.string(mandatory = True),
        "version": attr.string(mandatory = True),
        "_tool": attr.label(
            default = "//tools/wheel:make_wheel_tool",
            cfg = "exec",
            executable = True,
        ),
    },
)
