#!/usr/bin/env bash
# Kernels of every template on small shapes under compute-sanitizer (CUDA's toolkit), on a GPU: make sanitize.
set -euo pipefail
cd "$(dirname "$0")/.."
KERNELS="not ahead and not float16 and not float32 and (default_configuration or joining_and_new or repeated_unusable
 or appends_besides or test_exact_lists or test_blocks_at_once or newest_tokens or (every_configuration and 1) or (behind_the_length and 1)
 or ((rows_of_any_coverage or short_and_unindexed_rows or communities_of_any_grouping or later_turns) and 0)
 or (every_kappa and prefill and 8))"
for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 9 \
        "${PYTHON:-python}" -m pytest -q -p no:cacheprovider tests/templates -k "$(echo $KERNELS)"
done
