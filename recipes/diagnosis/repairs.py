"""A foreign file made whole, so that its dialect can read it: everything that had to be done to it
is a finding.

Legend: D hidden, V / Vd target / draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from drafters import TargetModel
from drafters.block import choose_mask_token
from drafters.export.borrowed import TOKEN_MAP, differing_rows
from drafters.export.dialect import EMBEDDING, Dialect, TensorSpec
from drafters.export.fields import MARKS, OFFSETS
from drafters.vocab import from_offsets, to_offsets
from recipes.diagnosis.findings import Finding, fault, misshapen, missing, turned, unplaced

OUTPUT = "lm_head.weight"
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
_NORMS = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}
_WIDE = ("fc.weight", "mask_hidden", "input_norm.weight")
"""As wide as there are captured layers, which the layer ids are compared with later."""


class Repairs:
    """The repair of one file.

    Args:
        dialect: of the file.
        config: completed.
        tensors: under the dialect's names.
        target: of the head.

    Attributes:
        config, tensors: that the dialect can read.
        findings: what was done.
    """

    def __init__(
        self,
        dialect: Dialect,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        target: TargetModel,
    ) -> None:
        self.dialect, self.target = dialect, target
        self.config, self.tensors = dict(config), dict(tensors)
        self.findings: list[Finding] = []

    def run(self, written: dict[str, Any]) -> None:
        """Repair everything; ``written`` is the config as it was."""
        off = {spec.name: False for spec in self.dialect.keys if spec.kind is bool}
        self.config = {**off, **self.config}
        self._switch_norms()
        self._count_rows("draft_vocab_size" in written)
        self._name_mask()
        self._map_vocabulary()
        self._fit()

    def _fault(self, check: str, message: str, fix: str, **numbers: float) -> None:
        self.findings.append(fault(check, message, fix, **numbers))

    # Keys ---------------------------------------------------------------------------------------

    def _switch_norms(self) -> None:
        """Norms before the fusion, whose tensors are there without their switch, or the reverse."""
        for name, tensor in _NORMS.items():
            if not isinstance(self.config.get(name), bool):
                continue
            said, has = self.config[name], tensor in self.tensors
            if said == has:
                continue
            self.config[name] = has
            nested = self.config.get("eagle_config")
            if name == "norm_before_fc" and isinstance(nested, dict):
                self.config["eagle_config"] = {**nested, name: has}
            tail = "engines leave them out" if has else "engines leave them at their random start"
            self._fault(
                "norm",
                f"the file has {'' if has else 'no '}{name} tensors and its config "
                f"{'no ' if has else ''}{name}: {tail}",
                f'set "{name}": {str(has).lower()} in config.json, or export again',
            )

    def _count_rows(self, named: bool) -> None:
        """The rows that the output matrix really has; ``named``: the config says how many."""
        matrix, said = self.tensors.get(OUTPUT), self.config.get("draft_vocab_size")
        if matrix is None or matrix.ndim != 2 or said is None:
            return
        hidden, rows = self.target.hidden_size, matrix.shape[0]
        if rows == hidden and matrix.shape[1] != hidden:
            rows = matrix.shape[1]  # stored the other way round
        if rows == said or rows > self.target.vocab_size:
            return
        self.config["draft_vocab_size"] = rows
        if named:
            self._fault(
                "vocabulary",
                f"draft_vocab_size is {said}, the output matrix has {rows} rows",
                f"set draft_vocab_size to {rows}",
            )

    def _name_mask(self) -> None:
        """A mask token where the file names none, or the one whose row is not the target's."""
        if not {"dflash", "dspark", "peagle"} & set(self.dialect.families):
            return
        places = (self.config, self.config.get("dflash_config") or {})
        given = [found[n] for found in places for n in MASKS if found.get(n) is not None]
        if not given:
            token = self._own_row()
            self._set_mask(likely_mask(self.target) if token is None else token)
            self._fault(
                "mask token",
                "config.json names none",
                "write mask_token_id (dflash_config) as it was in training",
            )
            return
        if "peagle" not in self.dialect.families:
            return
        token = self._own_row()
        if token is not None and token != given[0]:
            self._set_mask(token)
            self._fault(
                "mask token",
                f"config.json names row {given[0]} of the embedding, and the only row that is not "
                f"the target's is {token}",
                f"write {token} as {', '.join(name for name in MASKS if name in self.config)}",
            )

    def _own_row(self) -> int | None:
        """The only row of the file's embedding that is not the target's."""
        table, theirs = self.tensors.get(EMBEDDING), self.target.embedding.get_parameter("weight")
        if table is None or table.shape != theirs.shape:
            return None
        rows = differing_rows(table, theirs).nonzero().flatten().tolist()
        return rows[0] if len(rows) == 1 else None

    def _set_mask(self, token: int) -> None:
        for name in MASKS:
            if name in self.config or any(spec.name == name for spec in self.dialect.keys):
                self.config[name] = token
        if "dflash_config" in self.config:
            self.config["dflash_config"] = {**self.config["dflash_config"], "mask_token_id": token}

    # Vocabulary ---------------------------------------------------------------------------------

    def _map_vocabulary(self) -> None:
        """Offsets ``d2t`` with marks ``t2d``, or the absolute ids of a ``token_map``."""
        kept = self.tensors.get(TOKEN_MAP)
        if kept is not None and not self._maps(kept, None):
            offsets = from_offsets(kept.long())
            read = "as offsets" if self._maps(offsets, None) else "as the first tokens"
            ids = offsets if self._maps(offsets, None) else torch.arange(len(kept))
            self.tensors[TOKEN_MAP] = ids
            self._fault(
                "vocabulary",
                f"{TOKEN_MAP} holds no distinct token ids of the target: read {read}",
                "store absolute ids",
            )
        wanted = [spec for spec in self.dialect.specs(self.config) if spec.name == OFFSETS]
        if not wanted:
            return
        rows = wanted[0].shape[0]
        ids = self._ids(rows)
        self.tensors[OFFSETS] = to_offsets(ids)
        if MARKS in self.tensors:
            marks = torch.zeros(self.target.vocab_size, dtype=torch.bool)
            marks[ids] = True
            self.tensors[MARKS] = marks

    def _ids(self, rows: int) -> Tensor:
        """(Vd,) absolute ids; offsets unless only absolute ids make sense."""
        d2t, marks = self.tensors.get(OFFSETS), self.tensors.get(MARKS)
        size = self.target.vocab_size
        if marks is not None and marks.shape != (size,):
            marks = None
        if d2t is None or len(d2t) != rows:
            what = "missing" if d2t is None else f"of {len(d2t)} tokens"
            marked = marks is not None and int(marks.sum()) == rows
            self._fault(
                "vocabulary",
                f"d2t is {what}; the output matrix has {rows} rows, the target's {size}"
                + (": the tokens that t2d marks are taken, in order" if marked else ""),
                "copy d2t from the trained checkpoint"
                + ("" if marked else "; it cannot be made up again"),
            )
            return marks.nonzero().flatten() if marked and marks is not None else torch.arange(rows)
        absolute, offsets = d2t.long(), from_offsets(d2t.long())
        for ids, other, message, fix in (
            (offsets, marks, "", ""),
            (
                absolute,
                marks,
                "d2t holds absolute token ids where this dialect has offsets",
                "store d2t - arange(len(d2t))",
            ),
            (
                offsets,
                None,
                "d2t and t2d disagree about which tokens are drafted",
                "take both from the same checkpoint",
            ),
        ):
            if self._maps(ids, other):
                if message:
                    self._fault("vocabulary", message, fix)
                return ids
        self._fault(
            "vocabulary",
            "d2t leads out of the target's vocabulary or sends two rows to one token",
            "copy d2t from the trained checkpoint",
        )
        return torch.arange(rows)

    def _maps(self, ids: Tensor, marks: Tensor | None) -> bool:
        """Whether ids are distinct tokens, and those that ``marks`` (V,) marks."""
        inside = ids.min() >= 0 and ids.max() < self.target.vocab_size
        if not inside or ids.unique().numel() != ids.numel():
            return False
        return marks is None or bool(marks[ids].all())

    # Tensors ------------------------------------------------------------------------------------

    def _fit(self) -> None:
        """Nothing unknown, nothing missing, and all of the right shape."""
        expected = {spec.name: spec for spec in self.dialect.specs(self.config)}
        if extra := sorted(set(self.tensors) - set(expected)):
            for name in extra:
                del self.tensors[name]
            self.findings.append(unplaced(extra))
        absent, turned_over, wrong = [], [], []
        for name, spec in expected.items():
            tensor = self.tensors.get(name)
            if tensor is None and spec.optional:
                continue
            if tensor is None:
                absent.append(name)
                self.tensors[name] = self._filling(spec)
            elif tuple(tensor.shape) != spec.shape and tensor.shape[::-1] == spec.shape:
                turned_over.append(name)
                self.tensors[name] = tensor.T.contiguous()
            elif tuple(tensor.shape) != spec.shape and name not in _WIDE:
                wrong.append(f"{name} {list(tensor.shape)} for {list(spec.shape)}")
                self.tensors[name] = self._filling(spec)
        if absent:
            self.findings.append(missing(absent))
        if turned_over:
            self.findings.append(turned(turned_over))
        if wrong:
            self.findings.append(misshapen(wrong))

    def _filling(self, spec: TensorSpec) -> Tensor:
        """What a lost tensor does least harm as: the target's embedding, ones in norms, zeros."""
        if spec.name == EMBEDDING:
            return self.target.embedding.get_parameter("weight").detach().cpu().float()
        if spec.kind != "float":
            return torch.zeros(spec.shape, dtype=torch.int64)
        return torch.full(spec.shape, float("norm" in spec.name))


def likely_mask(target: TargetModel) -> int:
    """A token for the empty slots of blocks of which nothing is known."""
    try:
        return choose_mask_token(target)
    except ValueError:  # every token may occur in text
        return target.vocab_size - 1
