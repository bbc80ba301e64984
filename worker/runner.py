"""Runner: model, KV buffer and kernels of one rank; a plan in, logits and hidden states out."""

import torch

from paceline.kernels.api import KernelSet
from paceline.worker.batch import Batch, build_batch
from paceline.worker.cache.kv_buffer import KvBuffer
from paceline.worker.cache.req_to_token import ReqToToken
from paceline.worker.models.hidden import NO_CAPTURE, ForwardOutput, HiddenCapture
from paceline.worker.models.llama import LlamaModel
from paceline.worker.step import KvMoves, StepPlan


class Runner:
    def __init__(
        self, model: LlamaModel, kv: KvBuffer, req_to_token: ReqToToken, kernels: KernelSet
    ) -> None:
        self.model = model
        self.kv = kv
        self.req_to_token = req_to_token
        self.kernels = kernels

    @torch.inference_mode()
    def build(self, plan: StepPlan) -> Batch:
        """Writes the plan's pages into `req_to_token`; computes nothing."""
        return build_batch(plan, self.req_to_token, self.kernels)

    @torch.inference_mode()
    def forward(self, batch: Batch, capture: HiddenCapture = NO_CAPTURE) -> ForwardOutput:
        """Logits of the wanted tokens, and the hidden states that `capture` asks for."""
        return self.model.forward(batch, self.kv, capture)

    @torch.inference_mode()
    def move_kv(self, moves: KvMoves) -> None:
        device = self.req_to_token.table.device
        pairs = torch.tensor([moves.src, moves.tgt], dtype=torch.int64).to(device)
        self.kv.move(self.kernels, pairs[0], pairs[1])
