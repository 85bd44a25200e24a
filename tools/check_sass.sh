#!/usr/bin/env bash
# check_sass.sh WHEEL: fails if the machine code of the attention kernels in WHEEL is not what they were written to be. Every
# instance must have the instructions that it is fast by, and no local memory; and in the WGMMA kernel the wait for a tile's values
# must stand behind the exponentials of the next tile, but for one turn at head_dim 128. ptxas is free to move it in front of them, says nothing, and results are the
# same: 5 % of the time (docs/kernels/attention_sm90.md). The kernel that multiplies e4m3 with e4m3 waits for each product; it must have
# those, four instructions each, and transpose values by LDSM and STSM.
#
# Needs cuobjdump and nvdisasm on PATH (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm), and no GPU. A file that is no wheel is
# taken for a listing by `cuobjdump -sass`.
set -euo pipefail
input=${1:?usage: check_sass.sh WHEEL}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

list_code() {
    if [[ $input == *.whl ]]; then
        python3 -m zipfile -e "$input" "$folder" &&
            cuobjdump -sass "$folder"/pagetile/_C.abi3.so
    else
        cat "$input"
    fi
}

list_code | awk '
    function complain(what) {
        printf "%s, %s: %s\n", name, arch, what
        failed = 1
    }

    # Of the exponentials of a turn all come before the wait but those of results: for each of a thread'\''s two rows two for the
    # sink and one for the weight of a piece.
    function end_turn() {
        if (turn == "waited" && late > 6) {
            complain(late " exponentials behind the wait for the values")
        }
        turn = ""
    }

    function end_kernel() {
        if (kind == "") {
            return
        }
        count[arch " " kind]++
        if (local > 0) {
            complain(local " accesses to local memory (LDL, STL)")
        }
        if (kind == "fp8") {
            if (!has["QGMMA"]) complain("no QGMMA")
            if (!has["UTMALDG"]) complain("no UTMALDG")
            if (!has["LDSM"]) complain("no LDSM")
            if (!has["STSM"]) complain("no STSM")
            if (steps != 4 * products) complain(products " products of " steps " QGMMA in all, not of four each")
        } else if (kind == "wgmma") {
            end_turn()
            if (!has["HGMMA"]) complain("no HGMMA")
            if (!has["UTMALDG"]) complain("no UTMALDG")
            if (turns < 1 || turns + together < products - 1) {  # the first scores are multiplied alone
                complain("scores " products " times, with values under way " turns " times")
            }
            # At head_dim 128 one turn waits for both products: there are no registers for weights beside weights.
            if (together > (name ~ /Li128ELi128ELb0E/)) complain(together " turns wait for scores and values at once")
        } else {
            if (!has["HMMA"]) complain("no HMMA")
            if (!has["LDGSTS"]) complain("no LDGSTS")
            if (kind == "beside" && !has["UTMALDG"]) complain("no UTMALDG")
        }
    }

    /^[ \t]*code for / { end_kernel(); kind = ""; arch = $3; archs[arch] = 1; next }

    /Function :/ {
        end_kernel()
        name = $NF
        kind = name ~ /4sm9014prefill_kernel.*7LoadingE3E/ ? "fp8" : \
               name ~ /4sm9014prefill_kernel/ ? "wgmma" : name ~ /4sm8014prefill_kernel/ ? "portable" : \
               name ~ /4sm8015split_kv_kernel/ ? "split-KV" : \
               name ~ /4sm8022split_kv_beside_kernel/ && arch == "sm_90a" ? "beside" : ""  # elsewhere it is empty
        split("", has)
        local = turns = together = products = steps = keys = under_way = 0
        turn = ""
        next
    }

    kind == "" || $1 !~ /^\/\*[0-9a-f]+\*\/$/ { next }

    {
        code = $2 ~ /^@/ ? $3 : $2
        split(code, parts, ".")
        has[parts[1]] = 1
        local += parts[1] == "LDL" || parts[1] == "STL"
    }

    code ~ /^QGMMA/ { steps++; products += /gsb0/ }

    code ~ /^HGMMA/ {
        end_turn()
        under_way += /gsb0/
        if ($0 !~ /tnspB/) {
            match(code, /x[0-9]+x/)
            keys = substr(code, RSTART + 1, RLENGTH - 2)
            products += /gsb0/
        }
    }

    code ~ /^WARPGROUP.DEPBAR/ && /0x1 ;/ { end_turn(); turns++; turn = "softmax"; early = late = 0; next }

    code ~ /^WARPGROUP.DEPBAR/ {
        if (turn == "softmax" && early < keys / 2) {
            complain("only " early " exponentials of " keys / 2 " before the wait for the values")
        }
        together += turn == "" && under_way == 2
        turn = turn == "softmax" ? "waited" : ""
        under_way = 0
        next
    }

    code ~ /^MUFU.EX2/ { if (turn == "softmax") early++; else late++ }

    END {
        end_kernel()
        for (arch in archs) {
            wanted = arch == "sm_90a" ? "wgmma fp8 portable split-KV beside" : "portable split-KV"
            kinds = split(wanted, kind_of, " ")
            for (i = 1; i <= kinds; ++i) {
                total = count[arch " " kind_of[i]] + 0
                all += total
                if (total == 0) {
                    printf "%s: no %s kernel\n", arch, kind_of[i]
                    failed = 1
                }
            }
        }
        if (all == 0) {
            print "no attention kernel at all"
            failed = 1
        }
        if (!failed) {
            print all
        }
        exit failed
    }
' >"$folder/findings" || {
    echo "check_sass: $input:" >&2
    c++filt <"$folder/findings" >&2
    exit 1
}
echo "check_sass: $(cat "$folder/findings") attention kernels; no local memory, waits where they belong"
