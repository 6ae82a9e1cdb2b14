"""Drafter: what every draft head is.

A drafter is a network and nothing more. It borrows the target's embedding and output matrix by
reference, so they are never saved, never trained and never copied; unrolling it into a loss is
``training.objectives``, growing a tree out of it is ``inference.proposers``.

Legend: B batch, T rows, D hidden, V target vocabulary, Vd draft vocabulary.
"""

import logging
import math
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from drafters.confidence import ConfidenceHead, calibrated
from drafters.config import DrafterConfig
from drafters.layers import Attend, RMSNorm
from drafters.target import TargetModel
from drafters.vocab import choose_draft_vocab, scatter_to_target

logger = logging.getLogger(__name__)


class Drafter(PreTrainedModel):
    """Base of all heads: borrowing, the draft vocabulary, saving and loading.

    ``shape`` is one of the three shapes every family has: "independent", "sequential" or "block".
    """

    config_class = DrafterConfig
    base_model_prefix = "drafter"
    main_input_name = "hidden"
    family: ClassVar[str] = ""
    shape: ClassVar[str] = ""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self._target: TargetModel | None = None
        self._gathered: tuple[tuple, Tensor] | None = None
        if config.reduced_vocab:
            size = config.draft_vocab_size
            self.register_buffer("draft_vocab", torch.arange(size or 0, dtype=torch.int64))
        else:
            self.draft_vocab = None
        self.confidence = ConfidenceHead(self.output_size) if config.confidence_head else None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """``hidden_states`` indices of the target this head reads;

        Empty means the last hidden state only.
        """
        return ()

    @property
    def output_size(self) -> int:
        """Width of the rows that ``logits`` and the confidence head read; D unless a family
        overrides it.
        """
        return self.config.hidden_size

    @property
    def num_drafts(self) -> int | None:
        """K, the deepest draft this head was built for; None has no limit of its own."""
        return None

    @property
    def target(self) -> TargetModel:
        """The attached target.

        Raises:
            ValueError: :meth:`attach` was not called.
        """
        if self._target is None:
            raise ValueError("this head has no target: call attach(target) first")
        return self._target

    def attach(self, target: TargetModel, allow_other_target: bool = False) -> Self:
        """Borrow the embedding and output matrix of ``target``, by reference.

        Args:
            target: the model this head was, or will be, trained on.
            allow_other_target: accept different weights or another tokenizer of the same shape,
                with a warning.

        Raises:
            ValueError: the target is not the one this head was trained on; the message names what
                differs.
        """
        config = self.config
        for field, theirs in (
            ("hidden_size", target.hidden_size),
            ("vocab_size", target.vocab_size),
            ("target_num_layers", target.num_layers),
        ):
            if getattr(config, field) != theirs:
                raise ValueError(
                    f"wrong target: this head has {field}={getattr(config, field)} (trained on "
                    f"{config.target_name!r}) but {target.name!r} has {theirs}"
                )
        self._check_fingerprint(target, allow_other_target)
        self._target, self._gathered = target, None
        return self

    def _check_fingerprint(self, target: TargetModel, allow_other_target: bool) -> None:
        recorded, found = self.config.target_fingerprint or {}, target.fingerprint()
        differing = [key for key in recorded if key in found and recorded[key] != found[key]]
        if differing == ["chat_template"]:
            logger.warning(
                "chat template of %r differs from the one this head was trained with", target.name
            )
        elif differing and not allow_other_target:
            wanted = "the original target"
            if self.config.reference:
                wanted = "the merged target that its training wrote beside it (target/)"
            raise ValueError(
                f"wrong target: {', '.join(differing)} of {target.name!r} differ from "
                f"{self.config.target_name!r}, which this head was trained on; pass {wanted} "
                "(or allow_other_target=True to try anyway)"
            )
        elif differing:
            logger.warning("head trained on %r runs on %r", self.config.target_name, target.name)

    @torch.no_grad()
    def set_draft_vocab(self, counts: Tensor, start: str = "target") -> None:
        """Choose the draft vocabulary from token counts (V,) and give the head its start.

        Call once, before training. With the whole vocabulary only the start is made.

        Args:
            counts: (V,) occurrences of each token in the answers.
            start: "target" also starts layers and norms from the target's, "random" only the
                output matrices.
        """
        if self.draft_vocab is not None:
            size = self.draft_vocab.numel()
            self.draft_vocab.copy_(
                choose_draft_vocab(counts.cpu(), size, self.target.eos_token_ids)
            )
        self.initialise_output()
        if start == "target":
            self.initialise_from_target()

    def output_modules(self) -> list[nn.Module | None]:
        """Modules with weights of their own that turn rows into logits; none where the target's
        output matrix is borrowed.
        """
        return []

    def initialise_output(self) -> None:
        """Start trainable output matrices as copies of the target's rows; families that have some
        override.
        """

    def initialise_from_target(self) -> None:
        """Start layers and norms from the target's where shapes fit; families override."""

    def head_rows(self) -> Tensor:
        """Rows of the target's output matrix this head predicts, scaled to give logits, (Vd, D)."""
        weight = self.target.lm_head.weight
        if self.draft_vocab is not None:
            weight = weight[self.draft_vocab.to(weight.device)]
        return weight * self.target.logit_scale

    def borrowed_logits(self, hidden: Tensor) -> Tensor:
        """Logits through the target's own frozen output matrix, for heads that have none.

        Args:
            hidden: (..., D) in the space of the target's last hidden state.

        Returns:
            (..., Vd): of the draft vocabulary, where the head has one.
        """
        if self.draft_vocab is None:
            return self.target.project(hidden.to(self.target.dtype)).to(hidden.dtype)
        return self.target.project_rows(hidden, self._borrowed_rows(hidden), self.draft_vocab)

    def _borrowed_rows(self, like: Tensor) -> Tensor:
        """(Vd, D) rows of the target's output matrix, gathered once per draft vocabulary."""
        assert self.draft_vocab is not None
        if torch.compiler.is_compiling() and self._gathered is not None:
            return self._gathered[1]  # versions cannot be compared there
        key = (self.draft_vocab._version, like.dtype, like.device)
        if self._gathered is None or self._gathered[0] != key:
            weight = self.target.lm_head.weight
            rows = weight[self.draft_vocab.to(weight.device)].to(like)
            self._gathered = (key, rows)
        return self._gathered[1]

    @torch.no_grad()
    def acceptance(self, hidden: Tensor, depth: int) -> Tensor | None:
        """Calibrated chance that the draft made from each row is accepted, given that those before
        it were.

        Args:
            hidden: (..., output_size) rows that ``logits`` reads.
            depth: of the draft, from 0.

        Returns:
            (...) in [0, 1], or None without a confidence head.
        """
        if self.confidence is None:
            return None
        config = self.config
        return calibrated(
            self.confidence(hidden),
            depth,
            config.confidence_temperatures,
            config.confidence_biases,
        )

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids (...) to absolute target ids (...)."""
        return draft_ids if self.draft_vocab is None else self.draft_vocab[draft_ids]

    def to_target_logits(self, logits: Tensor) -> Tensor:
        """(..., Vd) -> (..., V), with -inf where the head cannot propose."""
        if self.draft_vocab is None:
            return logits
        return scatter_to_target(logits, self.draft_vocab, self.config.vocab_size, -math.inf)

    def num_parameters_trained(self) -> int:
        """Parameters that belong to this head."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)

    @classmethod
    def load(cls, folder: str | Path, target: TargetModel, **kwargs: Any) -> Self:
        """Load a native head and attach its target, checking every tensor.

        Args:
            folder: a ``save_pretrained`` folder or hub id.
            target: the model it was trained on.
            **kwargs: passed to ``from_pretrained``.

        Raises:
            ValueError: missing or damaged file, tensors missing or unexpected, wrong target.
        """
        loaded: Any
        try:
            loaded = cls.from_pretrained(
                str(folder),
                output_loading_info=True,
                dtype=kwargs.pop("dtype", torch.float32),
                **kwargs,
            )
        except SafetensorError as error:
            raise ValueError(
                f"head {folder}: model.safetensors is damaged or cut short ({error})"
            ) from error
        except (OSError, RuntimeError) as error:
            raise ValueError(f"head {folder}: cannot load it: {error}") from error
        head, info = loaded
        problems = {
            key: sorted(info[key])
            for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
            if info[key]
        }
        if problems:
            raise ValueError(f"head {folder}: the file does not fit its config: {problems}")
        with torch.no_grad():  # views of the mapped file are unaligned, and matmuls round otherwise
            for tensor in [*head.parameters(), *head.buffers()]:
                tensor.data = tensor.data.clone()
        return head.attach(target).to(target.device).eval()


class SequentialDrafter(Drafter):
    """A head that drafts step by step: each step reads the feature of the one before.

    Row t of step i (from 0) holds a feature and the embedding of token t+1+i, and drafts token
    t+2+i. Rows of a step that belong to committed text come from :meth:`begin`.
    """

    shape = "sequential"

    @property
    def num_layers(self) -> int:
        """Layers that call ``attend``."""
        return self.config.num_layers

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each of those layers; None sees everything."""
        return [self.config.sliding_window] * self.num_layers

    @abstractmethod
    def begin(
        self, features: Tensor | None, hidden: Tensor, position_ids: Tensor, attend: Attend
    ) -> Tensor:
        """The feature of step 0, from what the target says about committed text.

        Args:
            features: (B, T, F·D) captured layers, or None if the head reads none.
            hidden: (B, T, D) last hidden states.
            position_ids: (B, T).
            attend: for layers that run on committed rows before any step (Hydra++'s prefix).

        Returns:
            (B, T, width), in the dtype of the head.
        """

    @abstractmethod
    def forward(
        self,
        feature: Tensor,
        token_ids: Tensor,
        position_ids: Tensor,
        attend: Attend,
        depth: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Args:
            feature: (B, T, width), :meth:`begin`'s output or the previous step's next feature.
            token_ids: (B, T) token following each row's feature position.
            position_ids: (B, T) rotary positions: t at step 0, t+i at step i.
            attend: the caller's attention over keys of other rows.
            depth: i, from 0.

        Returns:
            ``(hidden (B, T, output_size), next_feature)``: ``hidden`` is for :meth:`logits` and the
            confidence head, ``next_feature`` goes into the following step.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """Rows (..., output_size) of step ``depth`` -> draft logits (..., Vd)."""
