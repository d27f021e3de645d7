"""Choosing: which sites of a cut graph plans compute, and which the framework keeps.

Measured choices that are stored count; the others are measured, or left as the cost model predicts. Equal
sites are measured once. A site that loses, is wrong, or cannot be built is reverted with its reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

from fuseplan.backends import backend_of
from fuseplan.errors import ArgumentError
from fuseplan.execution.build import build_ahead
from fuseplan.graph.cut import Cut, Site
from fuseplan.graph.progress import Progress
from fuseplan.graph.trial import Framework, forms_of, measured, problem_of
from fuseplan.graph.why import Reason, Why
from fuseplan.kernels.target import Target
from fuseplan.messages.excerpt import shown
from fuseplan.stores import cache, sites
from fuseplan.stores.sites import Key, Measured
from fuseplan.stores.tuned import processor_of
from fuseplan.tuning.tune import NEAR, near, tuned_records

Mode = Literal["predicted", "measured"]
SECONDS = 120.0  # of measuring one model: sites behind it are as predicted until the next start


def checked_mode(mode: str) -> Mode:
    """How sites are chosen; an ArgumentError where it is no word that is known."""
    for each in get_args(Mode):
        if mode == each:
            return each  # type: ignore[no-any-return]
    raise ArgumentError(f"choose={shown(mode)}; want 'predicted' or 'measured'")


def chosen(cut: Cut, framework: Framework, mode: Mode, is_built: bool = True) -> Cut:
    """The cut with the sites that are worth it, each with what was measured.

    Args:
        framework: what computes a site otherwise.
        mode: `predicted`: nothing is measured, and stored measurements count; `measured`: sites of which none
            is stored are measured, and that is stored.
        is_built: build the kernel of each site, so that one that fails is reverted.
    """
    keys = [key_of(site, framework) for site in cut.sites]
    known = {key: found for key in keys if (found := sites.KEPT.records().get(key)) is not None}
    if is_built:
        ahead = (site for key, site in zip(keys, cut.sites, strict=True) if not _is_lost(known.get(key)))
        build_ahead([site.built for site in ahead])
    if mode == "measured":
        cut = replace(cut, sites=tuple(_nearest(cut.sites, [key in known for key in keys])))
        known |= _measured(cut, keys, known, framework)
    kept, reverted = list[Site](), list[tuple[Site, Reason]]()
    for key, site in zip(keys, cut.sites, strict=True):
        made, reason = _applied(site, known.get(key))
        if reason is None and is_built:
            made, reason = _built(made)
        if reason is None:
            kept.append(made)
        else:
            reverted.append((made, reason))
    left = {id(node): reason for site, reason in reverted for node in site.nodes}
    gone = (*cut.reverted, *(site for site, _ in reverted))
    return replace(cut, sites=tuple(kept), left={**cut.left, **left}, reverted=gone)


def _is_lost(found: Measured | None) -> bool:
    """Whether a measurement gave the site back to the framework."""
    return found is not None and bool(found.code)


def left_whole(cut: Cut, reason: Reason) -> Cut:
    """The cut without its plans: the framework has the whole graph, for one reason."""
    left = {id(node): reason for site in cut.sites for node in site.nodes}
    return replace(cut, sites=(), left={**cut.left, **left}, reverted=(*cut.reverted, *cut.sites))


def key_of(site: Site, framework: Framework) -> Key:
    """What a choice for a site is stored by."""
    kinds = [node.origin.kind or node.op.word for node in site.nodes]
    told = "\n".join((str(site.plan), *kinds))
    return key_on(site.records.target, told, framework.name, str(site.records.accuracy))


def key_on(target: Target, told: str, framework: str, accuracy: str = "") -> Key:
    """What a choice is stored by: for plans on a machine, instead of a framework, by a text of all else."""
    digest = hashlib.sha256(told.encode()).hexdigest()
    toolchain = backend_of(target.backend).fingerprint() or ""
    versions = f"{cache.fingerprint() or ''} {toolchain}, {framework}"
    return Key(digest, accuracy, str(target), processor_of(target), versions)


def _built(site: Site) -> tuple[Site, Reason | None]:
    """The site with the records of the kernel that was built; or why there is none."""
    try:
        return site.of(site.compiled().records), None
    except Exception as error:  # a failure of one site never fails the model
        return site, Reason(Why.FAILED, problem_of(error))


def _nearest(sites: Sequence[Site], is_known: Sequence[bool]) -> Iterator[Site]:
    """The sites; on a GPU those of which nothing is known, with the fastest of their near candidates."""
    fresh = [
        None if known or site.built.plan.is_open or not site.records.target.processors else site.built
        for site, known in zip(sites, is_known, strict=True)
    ]
    build_ahead([each for built in fresh if built for each in near(built)])
    end = time.monotonic() + SECONDS
    for site, new in zip(sites, fresh, strict=True):
        built = site.built
        if new and time.monotonic() < end:
            with contextlib.suppress(Exception):  # `measured` tells the same of what is predicted
                built = tuned_records(built.plan, built.target, NEAR, accuracy=built.accuracy)
        yield site.of(built)


def _measured(
    cut: Cut, keys: Sequence[Key], known: Mapping[Key, Measured], framework: Framework
) -> dict[Key, Measured]:
    """Each distinct site of which nothing is known, measured and stored."""
    ahead = {key: site for key, site in reversed([*zip(keys, cut.sites, strict=True)]) if key not in known}
    example = framework.example({name for site in ahead.values() for name in site.reads}) if ahead else {}
    end, found = time.monotonic() + SECONDS, dict[Key, Measured]()
    with Progress(len(ahead), "measuring sites") as progress:
        for key, site in reversed(ahead.items()):
            if time.monotonic() > end:
                break
            progress.step(str(site.plan))
            found[key], is_kept = measured(cut.graph, site, framework, key, example)
            if is_kept:
                sites.keep(found[key])
    return found


def _applied(site: Site, found: Measured | None) -> tuple[Site, Reason | None]:
    """The site as it was measured, in its fastest form; why it is reverted, where it is."""
    if found is None:
        return site, None
    if _is_lost(found):
        return replace(site, measured=found, others=()), Reason(Why.of(found.code), found.said)
    site = next((form for form in forms_of(site) if str(form.plan) == found.plan), site)
    return replace(site, measured=found, others=()), None
