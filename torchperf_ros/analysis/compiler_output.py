"""The compiler's own debug output in a folder: graphs, guards, generated code, reasons, with an index page."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from html import escape
from pathlib import Path

import torch._inductor.config

from torchperf_ros.analysis.compiler_trace import TraceEvent
from torchperf_ros.analysis.inspected_model import InspectError
from torchperf_ros.analysis.inspection import Inspection
from torchperf_ros.analysis.inspection_report import summary

_EXPLANATIONS = {
    "dynamo_graph_break_reason": "Why the graph ends here: reason, stack, the compiler's own trace.",
    "dynamo_output_graph": "The graph as captured from Python, before any change.",
    "dynamo_cpp_guards_str": "The guards: what must hold for this compilation to be used again.",
    "recompile_reasons": "Which guards of earlier compilations failed.",
    "dynamo_side_effects": "What the function changes outside itself, done after the graph.",
    "before_pre_grad_graph": "The graph before inductor's first passes.",
    "after_pre_grad_graph": "The graph after inductor's first passes.",
    "aot_forward_graph_fw_metadata": "What AOTAutograd knows of inputs and outputs: aliases, mutations.",
    "aot_inference_graph": "The graph in ATen operators, without autograd.",
    "aot_forward_graph": "The forward graph in ATen operators.",
    "aot_backward_graph": "The backward graph in ATen operators.",
    "aot_joint_graph": "Forward and backward in one graph.",
    "before_joint_graph": "Before the passes over forward and backward together.",
    "after_joint_graph": "After the passes over forward and backward together.",
    "before_post_grad_graph": "Before inductor's last passes.",
    "inductor_post_grad_graph": "After inductor's last passes: what is lowered to kernels.",
    "inductor_output_code": "The generated kernels and the code that calls them.",
    "fx_graph_runnable": "A script that runs this graph alone, for bug reports and experiments.",
    "fx_graph_readable": "The graph that inductor got.",
    "fx_graph_transformed": "The graph after inductor's passes.",
    "ir_pre_fusion": "Inductor's IR before operators are fused into kernels.",
    "ir_post_fusion": "Inductor's IR after fusion: one node for each kernel.",
    "output_code": "The generated kernels and the code that calls them.",
    "runtime_wrapper_orchestration": "The wrappers that call the compiled code.",
    "torch._functorch.config": "Settings of AOTAutograd that are not the default ones.",
    "aotautograd_cache_miss": "Why AOTAutograd's cache was not used.",
    "fx_graph_cache_miss": "Why inductor's cache was not used.",
    "compiled_autograd_graph": "The graph of compiled autograd.",
    "ORIGINAL_BYTECODE": "The function's bytecode before the compiler.",
    "MODIFIED_BYTECODE": "The bytecode that replaces it: it calls the graphs.",
}
_CODE = ("graph", "code", "runnable", "orchestration")
_LEFT_OUT = frozenset({"chromium_event", "str", "artifact"})
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1f2933 }}
table {{ border-collapse: collapse; width: 100% }} td, th {{ padding: .25rem .8rem .25rem 0; text-align: left }}
tr {{ border-bottom: 1px solid #e3e8ee }} td.size {{ text-align: right; white-space: nowrap; color: #66727f }}
h2 {{ font-size: 1.05rem; margin: 2rem 0 .4rem }} code {{ font-size: .92em }} .dim {{ color: #66727f }}
.break {{ color: #b71c1c; margin: .2rem 0 }}
</style></head><body><h1>{title}</h1><p>{summary}</p>
{sections}
</body></html>
"""


class CompilerOutput:
    """A folder that is filled while the compiler runs."""

    def __init__(self, folder: Path) -> None:
        """Make the folder.

        Raises:
            InspectError: it holds something already, or cannot be made.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            empty = next(folder.iterdir(), None) is None
        except OSError as error:
            msg = f"--ir {folder}: {error.strerror or error}"
            raise InspectError(msg) from error
        if not empty:
            msg = f"--ir {folder}: the folder is not empty; name a new one, so that nothing gets mixed up"
            raise InspectError(msg)
        self.folder = folder.resolve()
        self._of: dict[Path, str] = {}

    def recording(self) -> AbstractContextManager[object]:
        """Context in which inductor writes its files here, and compiles even what its caches hold."""
        wanted = {"trace.enabled": True, "trace.debug_dir": str(self.folder), "force_disable_caches": True}
        return torch._inductor.config.patch(wanted)  # type: ignore[no-any-return]

    def keep(self, event: TraceEvent) -> None:
        """Write an event that has a text to a file of its own."""
        if not event.text or event.name in _LEFT_OUT or not event.compile_id:
            return
        name = event.name.replace("/", "_").removeprefix("torch_dynamo_resume_in_")
        suffix = ".py" if event.name.endswith(_CODE) else ".txt"
        stem = f"{len(self._of):03}_{event.compile_id.replace('/', '-')}_{name}"
        path = self.folder / f"{stem}{'.json' if event.text.lstrip()[:1] == '{' else suffix}"
        path.write_text(event.text, encoding="utf-8")
        self._of[path] = event.compile_id

    def write_index(self, inspection: Inspection) -> Path:
        """The page that links each file, under the function that it belongs to."""
        page = _PAGE.format(
            title=escape(f"Compiler output of {inspection.name}"),
            summary=escape(summary(inspection)),
            sections="\n".join(self._sections(inspection)),
        )
        path = self.folder / "index.html"
        path.write_text(page, encoding="utf-8")
        return path

    def _sections(self, inspection: Inspection) -> Iterator[str]:
        for item in inspection.breaks:
            place = f"{item.line.file}:{item.line.line}"
            words = f"{escape(item.category.value)}, <code>{escape(item.line.text)}</code>"
            yield f'<p class="break">Break: {words} <span class="dim">{escape(place)}</span></p>'
        for compile_id in dict.fromkeys(self._of.values()):
            name, file, line = inspection.function(compile_id)
            graphs = [str(graph.index) for graph in inspection.graphs if graph.compile_id == compile_id]
            label = f"graph {', '.join(graphs)}" if graphs else "no graph"
            heading = f"{escape(name)}, {label}"
            yield f'<h2>{heading} <span class="dim">{escape(file)}:{line}, compilation {compile_id}</span></h2>'
            yield _table(self.folder, [path for path, owner in self._of.items() if owner == compile_id])
        for folder in sorted({path.parent for path in self.folder.rglob("*") if path.is_file()} - {self.folder}):
            yield f"<h2>inductor <span class='dim'>{escape(str(folder.relative_to(self.folder)))}</span></h2>"
            yield _table(self.folder, sorted(path for path in folder.iterdir() if path.is_file()))


def _table(folder: Path, paths: list[Path]) -> str:
    rows = []
    for path in paths:
        link = escape(path.relative_to(folder).as_posix(), quote=True)
        size = f"{path.stat().st_size:,} B"
        rows.append(
            f'<tr><td><a href="{link}"><code>{escape(path.name)}</code></a></td>'
            f'<td class="size">{size}</td><td>{_explanation(path)}</td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def _explanation(path: Path) -> str:
    stem = path.stem
    found = [(key, text) for key, text in _EXPLANATIONS.items() if stem.endswith(key)]
    return max(found, key=lambda pair: len(pair[0]))[1] if found else "Not described here; the compiler's own name."
