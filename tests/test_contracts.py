"""The reference and plain torch under every contract; nemo-automodel lives in an environment of its own."""

from contracts import contract_tests

test_reference_keeps_every_contract = contract_tests("reference")
test_plain_torch_keeps_every_contract = contract_tests("torch_dcp", profile="smoke")
