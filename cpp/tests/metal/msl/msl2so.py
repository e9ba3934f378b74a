"""Compile simple MSL for this machine: ``msl2so.py IN.metal OUT.so``.

Buffers, scalars, thread positions, threadgroup memory, barriers, sums in a simdgroup,
simdgroup matrices, half, vectors and function constants work. Templates, ``host_name``, swizzles
and textures do not.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from toolchain import host_cxx  # noqa: E402

POSITIONS = {
    "thread_position_in_grid": "position_in_grid",
    "threads_per_grid": "grid",
    "thread_position_in_threadgroup": "position_in_group",
    "threadgroup_position_in_grid": "group",
    "threads_per_threadgroup": "group_size",
    "dispatch_threads_per_threadgroup": "group_size",
    "threadgroups_per_grid": "groups",
}
SCALARS = {
    "thread_index_in_threadgroup": "p.index_in_group",
    "thread_index_in_simdgroup": "(p.index_in_group % 32)",
    "simdgroup_index_in_threadgroup": "(p.index_in_group / 32)",
    "threads_per_simdgroup": "32",
    "simdgroups_per_threadgroup": "((p.threads_in_group + 31) / 32)",
}
KERNEL = r"(?:\[\[\s*kernel\b[^\]]*\]\]|\bkernel)\s+void\s+(\w+)\s*\("
ENTRY = """
METAL_SIM_EXPORT unsigned long metal_slots_{name} = {slots}ull;
METAL_SIM_EXPORT void metal_kernel_{name}(const metal_sim::Dispatch* d) {{
  uint3 size(d->group[0], d->group[1], d->group[2]), grid(d->grid[0], d->grid[1], d->grid[2]);
  uint3 groups((grid.x + size.x - 1) / size.x, (grid.y + size.y - 1) / size.y,
               (grid.z + size.z - 1) / size.z);
  std::vector<std::vector<char>> memory(metal_sim::kMaxBuffers);
  char* threadgroup[metal_sim::kMaxBuffers];
  for (int i = 0; i < metal_sim::kMaxBuffers; i++) {{
    memory[i].resize(d->threadgroup_bytes[i] + 16);
    threadgroup[i] = memory[i].data();
  }}
  struct Call {{
    const metal_sim::Dispatch* d;
    MetalSimPosition p;
  }} call{{d, {{uint3(0u), grid, uint3(0u), uint3(0u), size, groups, 0,
              size.x * size.y * size.z, threadgroup}}}};
  uint3& group = call.p.group;
  for (group.z = 0; group.z < groups.z; group.z++)
    for (group.y = 0; group.y < groups.y; group.y++)
      for (group.x = 0; group.x < groups.x; group.x++)
        metal::sim::RunGroup(call.p.threads_in_group, [](void* argument, uint i) {{
          const metal_sim::Dispatch* d = static_cast<Call*>(argument)->d;
          MetalSimPosition p = static_cast<Call*>(argument)->p;
          uint3 n = p.group_size;
          p.index_in_group = i;
          p.position_in_group = uint3(i % n.x, i / n.x % n.y, i / (n.x * n.y));
          p.position_in_grid = uint3(p.group.x * n.x + p.position_in_group.x,
                                     p.group.y * n.y + p.position_in_group.y,
                                     p.group.z * n.z + p.position_in_group.z);
          if (p.position_in_grid.x >= p.grid.x || p.position_in_grid.y >= p.grid.y ||
              p.position_in_grid.z >= p.grid.z) return;
          {name}({arguments});
        }}, &call, {has_barriers});
}}
"""


def split_parameters(text: str) -> list[str]:
    """Split at the commas outside all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def closing(text: str, opening: int) -> int:
    """Return the index of the parenthesis that closes the one at ``opening``."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    sys.exit("error: unbalanced parentheses")


def argument(parameter: str) -> tuple[str, int]:
    """Return the expression that a kernel's parameter gets, and the bits of its slot."""
    attribute = re.search(r"\[\[\s*(.*?)\s*\]\]", parameter)
    if attribute is None:
        sys.exit(f"error: parameter without an attribute: {parameter}")
    name = attribute.group(1)
    declaration = re.sub(r"\[\[.*?\]\]", "", parameter).strip()
    kind = re.sub(
        r"\b(device|constant|threadgroup|thread|const|restrict|__restrict)\b", "", declaration
    )
    kind = re.sub(r"\w+\s*$", "", kind).strip()
    index = re.search(r"\(\s*(\d+)\s*\)", name)
    if name.startswith("buffer") and index:
        slot = 1 << int(index.group(1))
        if re.search(r"\b(const|constant)\b", declaration):
            slot |= slot << 32
        star = "*" if "&" in kind else ""
        return f"{star}({kind.rstrip('&* ')}*)d->buffer[{index.group(1)}]", slot
    if name.startswith("threadgroup(") and index:
        return f"({kind.rstrip('* ')}*)p.threadgroup[{index.group(1)}]", 0
    if name in POSITIONS:
        axes = {"2": "xy", "3": "xyz"}.get(kind[-1], "x")
        return f"{kind}({', '.join(f'p.{POSITIONS[name]}.{axis}' for axis in axes)})", 0
    if name in SCALARS:
        return SCALARS[name], 0
    sys.exit(f"error: unknown attribute [[{name}]]")


def take_constants(source: str) -> tuple[str, str]:
    """Make function constants variables that the simulator sets; return their table too."""
    pattern = r"\bconstant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\s*\(\s*(\d+)\s*\)\s*\]\]"
    rows = [
        f'{{"{name}", {index}, &{name}, sizeof({name})}},'
        for _, name, index in re.findall(pattern, source)
    ]
    table = "METAL_SIM_EXPORT const metal_sim::Constant metal_constants[] = {"
    return re.sub(pattern, r"static \1 \2", source), f"{table}{''.join(rows)}{{}}}};\n"


def convert(source: str) -> str:
    """Return C++ for the host."""
    source = re.sub(r"//[^\n]*", "", source)
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.S)
    source, constants = take_constants(source)
    has_barriers = bool(re.search(r"_barrier\s*\(|\bsimd_\w+\s*\(", source))
    entries, names = "", []
    for match in re.finditer(KERNEL, source):
        parameters = source[match.end() : closing(source, match.end() - 1)]
        arguments = [argument(parameter) for parameter in split_parameters(parameters)]
        slots = 0
        for _, slot in arguments:
            slots |= slot
        names.append(match.group(1))
        entries += ENTRY.format(
            name=match.group(1),
            slots=slots,
            arguments=", ".join(expression for expression, _ in arguments),
            has_barriers=str(has_barriers).lower(),
        )
    if not names:
        sys.exit("error: no kernel in the source")
    # Threadgroup arrays are one per group that runs; elsewhere the qualifier means nothing.
    source = re.sub(
        r"\bthreadgroup\s+((?:\w|<|>|::)+\s+\w+\s*\[)", r"static thread_local \1", source
    )
    source = re.sub(r"\bthreadgroup\b(?!_)", "", source)
    source = re.sub(r"\[\[.*?\]\]", "", source, flags=re.S)
    list_of_names = ", ".join(f'"{name}"' for name in names)
    return (
        "#include <metal_stdlib>\n"
        '#define METAL_SIM_EXPORT extern "C" __attribute__((visibility("default")))\n'
        f'#line 1 "kernel.metal"\n{source}{entries}'
        f"METAL_SIM_EXPORT const char* const metal_kernel_names[] = {{{list_of_names}, nullptr}};\n"
        f"{constants}"
    )


def compile_msl(source: str, library: Path) -> None:
    """Compile into a shared library; ``METAL_SIM_CACHE`` names a folder for compiled ones."""
    cpp = convert(source)
    cache = os.environ.get("METAL_SIM_CACHE")
    prelude = (HERE / "metal_stdlib").read_bytes()
    cached = Path(cache or ".") / (hashlib.sha256(cpp.encode() + prelude).hexdigest() + ".so")
    if cache and cached.exists():
        shutil.copy(cached, library)
        return
    file = library.with_suffix(".cpp")
    file.write_text(cpp)
    options = ["-w", "-fvisibility=hidden", "-I", str(HERE), "-I", str(HERE.parent / "sim")]
    object_file = library.with_suffix(".o")
    subprocess.run([*host_cxx(), *options, "-c", file, "-o", object_file], check=True)
    subprocess.run(["g++", "-shared", object_file, "-o", library], check=True)
    if cache:
        cached.parent.mkdir(parents=True, exist_ok=True)
        fresh = cached.with_suffix(f".{os.getpid()}")
        shutil.copy(library, fresh)
        fresh.rename(cached)


if __name__ == "__main__":
    try:
        compile_msl(Path(sys.argv[1]).read_text(), Path(sys.argv[2]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
