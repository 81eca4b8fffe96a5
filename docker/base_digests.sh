#!/bin/sh
# Writes the digest that its registry has today for the tag of every pinned image: base_digests.sh FILE ... (`make base-digests`).
# Needs skopeo (Debian: apt-get install skopeo). Change a tag by hand first, then run it.
set -eu

for file in "$@"; do
    grep -ohE '[a-z]+(/[a-z]+)?:v?[0-9][0-9a-z.-]*@sha256:[0-9a-f]{64}' "$file" | sort -u | while read -r pinned; do
        image=${pinned%@*}
        case $image in
            */*) name=docker.io/$image ;;
            *) name=docker.io/library/$image ;;
        esac
        manifest=$(mktemp)
        skopeo inspect --raw "docker://$name" >"$manifest"
        digest=sha256:$(sha256sum "$manifest" | cut -d ' ' -f 1)
        rm "$manifest"
        if [ "$pinned" = "$image@$digest" ]; then
            echo "$file: $image is up to date"
        else
            sed -i "s|$pinned|$image@$digest|" "$file"
            echo "$file: $image is now $digest"
        fi
    done
done
