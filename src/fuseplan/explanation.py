"""What was decided about a plan, as text and as JSON: it reads the stages' records and decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fuseplan.errors import Unsupported, counted
from fuseplan.execution.stages import Records, decide
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.match import unfuse
from fuseplan.kernels.target import Target, parse_target
from fuseplan.kernels.template import Accuracy, Traffic
from fuseplan.messages.excerpt import operator_span, underlined
from fuseplan.messages.folding import WIDTH, fold
from fuseplan.messages.quantities import bytes_text, count_text, seconds_text
from fuseplan.ops.normalization import Normalization
from fuseplan.plans.dot import preformatted
from fuseplan.plans.plan import FusionPlan, as_plan
from fuseplan.stores.tuned import processor_of

TARGET = ("is_host", "cpu", "shape", "threads", "processors", "device", "vector_bytes")  # that JSON tells
NEAREST = 3  # candidates of each template that the text shows besides the chosen one
MEASURE = "not measured on this machine: `fuseplan explain PLAN --measure` does, in about a second"


@dataclass(frozen=True, repr=False)
class Explanation:
    """An explanation: JSON values in `told`; printed, and at Python's prompt, as text."""

    told: Mapping[str, Any]

    @property
    def is_fused(self) -> bool:
        """Whether there is a kernel for the plan."""
        return bool(self.told["fused"])

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON values."""
        return dict(self.told)

    def text(self, width: int = WIDTH, *, is_whole: bool = False) -> str:
        """The explanation in words.

        Args:
            width: columns at which long lines go on below.
            is_whole: name every candidate of each template, not the nearest few alone.
        """
        if not self.is_fused:
            return fold(_refused_lines(self.told), width)
        return fold(
            _fused_lines(self.told, len(self.told["choice"]["considered"]) if is_whole else NEAREST), width
        )

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__  # who asks at the prompt wants to read it

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def explain(
    plan: FusionPlan | str,
    target: Target | str = "cpu",
    accuracy: Accuracy = "default",
    *,
    threads: int | None = None,
    template: str | None = None,
) -> Explanation:
    """Explains what `compile` would do, or why it would refuse; for any target, without its toolchain.

    Args:
        plan: the plan, or its text.
        target: as for `compile`.
        accuracy: as for `compile`.
        threads: as for `compile`.
        template: as for `compile`.

    Raises:
        PlanError: the text is no plan.
        ArgumentError: the target, the threads, the accuracy or the template cannot be.
    """
    try:
        return explain_records(decide(plan, target, threads=threads, accuracy=accuracy, template=template))
    except Unsupported as refused:
        return _explain_refusal(as_plan(plan), str(parse_target(target)), refused)


def _explain_refusal(plan: FusionPlan, target: str, refused: Unsupported) -> Explanation:
    return Explanation(
        {
            "plan": str(plan),
            "target": target,
            "fused": False,
            "what": refused.what,
            "refusals": [
                {**refusal.to_json(), "remedy": refused.advice(refusal)} for refusal in refused.refusals
            ],
        }
    )


def explain_records(records: Records, resources: Mapping[str, int] | None = None) -> Explanation:
    """Explains what the records hold; `resources` is what the program made of them uses, if it is told."""
    kernel, template, target = records.kernel, records.choice.template, records.target
    source = records.source
    traffic = template.traffic(kernel, target)
    floor = _floor(records, traffic.total)
    apart = [_alone(plan, target) for plan in unfuse(records.plan)]
    return Explanation(
        {
            "plan": str(records.plan),
            "target": {"name": str(target), **{name: getattr(target, name) for name in TARGET}},
            "accuracy": records.accuracy,
            "fused": True,
            "match": records.match.to_json(),
            "choice": records.choice.to_json(),
            "kernel": kernel.text,
            "kernels": 1,
            "passes": _passes(kernel, traffic, records.plan),
            "operators": len(records.plan),
            "output": str(records.plan.output),
            "workspace_bytes": source.workspace(target.threads),
            "traffic": {
                "read": traffic.read,
                "written": traffic.written,
                "workspace": traffic.workspace,
                "fused": traffic.total,
                "one_at_a_time": sum(apart),
                "saved": sum(apart) - traffic.total,
                "least": kernel.minimum_bytes,
            },
            "flops": {"plan": kernel.flops, "algorithm": template.flops(kernel)},
            # The model knows kinds of machines: the rates of this one bound what it says.
            "estimated_seconds": max(records.choice.seconds, floor["seconds"] if floor else 0.0),
            "error_bound": template.error_bound(kernel),
            "error_scale": template.error_scale,
            "floor": floor,
            "resources": dict(resources or {}),
            "verdict": _verdict(records),
        }
    )


def _passes(kernel: Kernel, traffic: Traffic, plan: FusionPlan) -> dict[str, Any] | None:
    """How often a kernel with statistics reads each tensor of the size of src; None of one without.

    A template that keeps what it has read on the chip reads each once.
    """
    if not kernel.statistics:
        return None
    tensors = ["src", *(operand.key for operand in kernel.operands if not operand.packed)]
    counts = {name: sum(name in read for read in kernel.read_in_passes) for name in tensors}
    written = kernel.written_bytes
    is_kept = traffic.read < kernel.minimum_bytes - written + kernel.src.nbytes
    return {
        "count": kernel.passes
        - (kernel.dst.size < kernel.src.size),  # one element of dst needs no second look
        "per": next(step.op.per for step in plan if isinstance(step.op, Normalization)),
        "elements": kernel.reduced_count,
        "kept": is_kept,
        "reads": dict.fromkeys(tensors, 1) if is_kept else counts,
    }


def _alone(plan: FusionPlan, target: Target) -> int:
    """Bytes that one operator moves by itself: its kernel's, or the least where it has none."""
    try:
        records = decide(plan, target)
    except Unsupported:
        return plan.src.nbytes + plan.output.nbytes
    return records.choice.template.traffic(records.kernel, target).total


def _floor(records: Records, moved: int) -> dict[str, Any] | None:
    """The least time on this machine by its measured peaks; None elsewhere, and before they are measured."""
    from fuseplan.measure.peaks import GpuPeaks, multiplied_dtype, peaks_of

    measured, kernel = peaks_of(records.target), records.kernel
    if measured is None:
        return None
    if isinstance(measured, GpuPeaks):
        floor = measured.floor(kernel)
    else:
        flops, dtype = records.choice.template.flops(kernel), multiplied_dtype(kernel)
        floor = measured.floor(flops, kernel.minimum_bytes, footprint=moved, dtype=dtype)
    return {**asdict(floor), "peaks": measured.to_json()}


def _verdict(records: Records) -> dict[str, Any] | None:
    """The last verdict that was measured on this kind of machine; None where there is none."""
    from fuseplan.tuning.verdict import recorded

    found = recorded(str(records.plan), str(records.target), processor_of(records.target))
    return None if found is None else {**found.to_json(), "text": str(found)}


def _fused_lines(told: Mapping[str, Any], shown: int) -> Iterator[str]:
    target, traffic, flops = told["target"], told["traffic"], told["flops"]
    machine = f" ({target['cpu']})" if target["cpu"] else ""
    yield told["plan"]
    yield ""
    yield f"target      {target['name']}{machine}, {target['shape']}, accuracy {told['accuracy']}"
    yield f"rule        {told['match']['rule']}: {' -> '.join(told['match']['steps'])}"
    for refusal in told["match"]["passed_over"]:
        yield f"            not {refusal['tried']}: {_reason(refusal)}"
    yield f"template    {told['choice']['considered'][0]['template']}"
    yield from _tuned_lines(told["choice"]["tuned"])
    yield from _considered_lines(told["choice"], shown)
    yield f"kernels     {told['kernels']} for {counted(told['operators'], 'operator')}"
    if told["passes"]:
        yield from _passes_lines(told["passes"])
    yield f"output      {told['output']}"
    yield f"workspace   {bytes_text(told['workspace_bytes'])}"
    yield (
        f"traffic     {bytes_text(traffic['fused'])}; one at a time {bytes_text(traffic['one_at_a_time'])}: "
        f"{bytes_text(traffic['saved'])} saved; the least possible is {bytes_text(traffic['least'])}"
    )
    done, wanted = count_text(flops["algorithm"]), count_text(flops["plan"])
    yield f"arithmetic  {done} operations; by the formula {wanted}"
    bound = f"at most {told['error_bound']:.1e} of {told['error_scale']}"
    yield f"error       {bound}, before it is rounded to the output's dtype"
    yield f"estimate    {_estimate_text(told)}"
    yield f"floor       {_floor_text(told)}"
    if told["resources"]:
        yield f"code        {_resources_text(told['resources'])}"
    if told["verdict"]:
        first, *others = told["verdict"]["text"].splitlines()
        yield f"verdict     {first}"
        yield from (f"          {line}" for line in others)


def _passes_lines(passes: Mapping[str, Any]) -> Iterator[str]:
    """Why there are several, and what they read."""
    whose = {
        "channel": "a channel",
        "activation": "a place of all images",
        "row": "a row",
        "cell": "a place along the other axes",
    }[passes["per"]]
    yield (
        f"passes      {passes['count']} over the data: the statistics of {whose}, {passes['elements']} "
        "elements, come before what uses them;"
    )
    first, *others = (f"{name} is read in {count}" for name, count in passes["reads"].items())
    listed = ", ".join([first, *(each.replace("is read ", "") for each in others)])
    yield f"            {'all is read once, and kept on the chip' if passes['kept'] else listed}"


def _resources_text(used: Mapping[str, int]) -> str:
    """What a GPU's kernel uses, in words."""
    spills = f"{used['spill_bytes']} bytes of them spilled" if used["spill_bytes"] else "none spilled"
    return (
        f"{used['registers']} registers per thread, {spills}; {bytes_text(used['shared_bytes'])} of shared "
        f"memory for {used['threads']} threads; {used['programs']} at a time on a multiprocessor"
    )


def _tuned_lines(tuned: Mapping[str, Any] | None) -> Iterator[str]:
    """The measurement that a choice rests on, if it does."""
    if tuned is None:
        return
    taken = seconds_text(tuned["seconds"])
    yield f"            measured: {taken}, the best of {tuned['tried']}, {tuned['date']}"
    if not tuned["is_current"]:
        yield f"            with {tuned['toolchain']}; not yet with the versions here: tune again"
    if tuned["disturbance"]:
        yield f"            the times are unreliable: {tuned['disturbance']}; tune again when they rest"
    elif tuned["untuned"] != tuned["template"] and tuned["untuned_seconds"] is not None:
        yield f"            the model's own choice took {seconds_text(tuned['untuned_seconds'])}"


def _considered_lines(choice: Mapping[str, Any], shown: int) -> Iterator[str]:
    """The refusals, and of each template the `shown` candidates that are nearest by the model."""
    tuned = choice["tuned"] or {"times": {}}
    slower = "" if choice["tuned"] else "slower, "  # what was measured may be another than the model's first
    met: Counter[str] = Counter()
    for each in choice["considered"][1:]:
        if each["refusal"]:
            yield f"            not {each['template']}: {_reason(each['refusal'])}"
            continue
        if each["fault"]:
            yield f"            not {each['template']}: {each['fault']}"
            continue
        name = each["template"].partition("(")[0]
        met[name] += 1
        taken = tuned["times"].get(each["template"])
        if met[name] <= shown or taken is not None:
            found = "" if taken is None else f", {seconds_text(taken)} measured"
            told = f"{slower}{seconds_text(each['seconds'])} by the model{found}"
            yield f"            not {each['template']}: {told}"
    more = [f"{count - shown} more of {name}" for name, count in met.items() if count > shown]
    if more:
        yield f"            ... and {', '.join(more)}: `fuseplan explain -v` lists them"


def _estimate_text(told: Mapping[str, Any]) -> str:
    """The estimate, and whose it is: the model's, or the floor above it."""
    estimate, model = told["estimated_seconds"], told["choice"]["considered"][0]["seconds"] or 0.0
    if estimate == model:
        return f"{seconds_text(model)}, by the model that ranks templates"
    return f"{seconds_text(estimate)}, the floor; the model that ranks templates estimates less"


def _floor_text(told: Mapping[str, Any]) -> str:
    floor = told["floor"]
    if floor is not None:
        limit = "arithmetic" if floor["bound"] == "compute" else f"{floor['bound']} bandwidth"
        text = f"{seconds_text(floor['seconds'])}, set by {limit} as measured on this machine"
        met = _least_measured(told)
        if met is None or met >= floor["seconds"]:
            return text
        return f"{text}; too high, since a launch took {seconds_text(met)}: measure again with --measure"
    return MEASURE if told["target"]["is_host"] else "known for this machine only: target cpu or cuda"


def _least_measured(told: Mapping[str, Any]) -> float | None:
    """The least time that a launch of the plan's kernel was measured to take; None before it was."""
    tuned, verdict = told["choice"]["tuned"], told["verdict"]
    met = ([tuned["seconds"]] if tuned else []) + ([verdict["fused"]] if verdict else [])
    return min(met, default=None)


def _refused_lines(told: Mapping[str, Any]) -> Iterator[str]:
    yield told["what"]
    blamed: object = ()
    for refusal in told["refusals"]:
        yield ""
        if refusal["operator"] != blamed:
            blamed = refusal["operator"]
            span = None if blamed is None else operator_span(told["plan"], refusal["operator"])
            yield from (f"  {line}" for line in underlined(told["plan"], span))
        yield f"  {refusal['tried']}: {_reason(refusal)}"
        if refusal["remedy"]:
            yield f"  {refusal['remedy']}"


def _reason(refusal: Mapping[str, Any]) -> str:
    got = f"{refusal['got']}; " if refusal["got"] is not None else ""
    want = f"; want {refusal['want']}" if refusal["want"] is not None else ""
    return f"{got}{refusal['sentence']}{want}  [{refusal['code']}]"
