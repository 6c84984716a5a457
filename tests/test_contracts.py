"""The reference and plain torch under contract; nemo-automodel lives in an environment of its own."""

from contracts import contract_tests

test_reference_keeps_every_contract = contract_tests("reference", profile="smoke", worlds=(2,))
test_plain_torch_keeps_these_contracts = contract_tests(
    "torch_dcp",
    profile="smoke",
    worlds=(2,),
    contracts=(
        "order.params-*",
        "order.scheduler-*",
        "precision.moments-*",
        "publish.f*",
        "publish.published-*",
        "resume.trajectory",
    ),
)
