"""EAGLE-3 and EAGLE-3.1, as one entry of the registry."""

from torchspec.drafts.base import DraftArchitecture
from torchspec.drafts.eagle3 import checkpoint
from torchspec.drafts.eagle3.blocks import training_time_test
from torchspec.drafts.eagle3.model import Eagle3
from torchspec.drafts.eagle3.spec import Eagle3Spec, check_spec, make_spec

EAGLE3 = DraftArchitecture(
    name=Eagle3Spec.arch,
    method="eagle3",
    served_as=checkpoint.SERVED_AS,
    layouts=checkpoint.LAYOUTS,
    layouts_with_embeddings=("speculators",),  # that library fills what is missing with uninitialised memory
    make_spec=make_spec,
    check_spec=check_spec,
    model=Eagle3,
    objective=training_time_test,
    config_json=checkpoint.config_json,
    spec_from_json=checkpoint.spec_from_json,
    layout_of=checkpoint.layout_of,
    renamed=checkpoint.renamed,
    required_names=checkpoint.required_names,
    engine_name=checkpoint.engine_name,
)
