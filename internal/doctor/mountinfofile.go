package doctor

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// misspelled are the wrong keys that were seen in the field, and the right ones.
var misspelled = map[string]string{
	"volume_type": "volume-type", "volumeType": "volume-type", "VolumeType": "volume-type",
	"fs_type": "fstype", "fsType": "fstype", "FsType": "fstype",
	"mountOptions": "options", "mount_options": "options",
	"Device": "device", "Options": "options", "Metadata": "metadata",
}

// checkInfo looks for the traps in a mountInfo.json: what one of Kata's two
// runtimes accepts, the other may take for a broken file.
func (v kataVolume) checkInfo() []Finding {
	data, err := v.node.read(filepath.Join(v.path, abi.InfoName))
	if err != nil {
		return []Finding{failure("run crustctl doctor as root, or remove the volume", "volume %q: %s cannot be read: %v", v.target, abi.InfoName, err)}
	}
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(data, &keys); err != nil {
		return []Finding{failure("publish the volume again; its writer must write the file elsewhere and rename it",
			"volume %q: %s is no JSON object, or cut off: %v", v.target, abi.InfoName, err)}
	}
	var found []Finding
	for _, trap := range traps(keys, v.target) {
		found = append(found, failure("correct the program that wrote it; volumes of crust-proxy itself: crustctl reconcile",
			"volume %q: %s %s", v.target, abi.InfoName, trap))
	}
	return found
}

func traps(keys map[string]json.RawMessage, target string) []string {
	var found []string
	for _, wrong := range slices.Sorted(maps.Keys(misspelled)) {
		if _, there := keys[wrong]; there {
			found = append(found, fmt.Sprintf("has the key %q, which must be %q", wrong, misspelled[wrong]))
		}
	}
	for _, key := range []string{"volume-type", "device", "fstype"} {
		found = append(found, stringTrap(keys, key, target)...)
	}
	var metadata map[string]string
	if raw, there := keys["metadata"]; there && json.Unmarshal(raw, &metadata) != nil {
		found = append(found, "has metadata that is no map of strings")
	}
	return append(found, optionTraps(keys)...)
}

func stringTrap(keys map[string]json.RawMessage, key, target string) []string {
	raw, there := keys[key]
	if !there {
		return []string{fmt.Sprintf("lacks the key %q: Kata's Rust runtime refuses it", key)}
	}
	var value string
	if err := json.Unmarshal(raw, &value); err != nil {
		return []string{fmt.Sprintf("has a %q that is no string", key)}
	}
	switch {
	case key == "volume-type" && value == "blk" && katasEmptyDir(target):
		return nil // both runtimes write and read it so
	case key == "volume-type" && !slices.Contains([]string{"directvol", "spdkvol", "vfiovol"}, value):
		return []string{fmt.Sprintf("has the volume-type %q: Kata's Rust runtime wants directvol", value)}
	case value == "":
		return []string{fmt.Sprintf("has an empty %q", key)}
	}
	return nil
}

func optionTraps(keys map[string]json.RawMessage) []string {
	raw, there := keys["options"]
	if !there {
		return nil
	}
	var options []string
	if err := json.Unmarshal(raw, &options); err != nil {
		return []string{"has options that are no list of strings"}
	}
	for _, o := range options {
		if o == "bind" || o == "rbind" {
			return []string{fmt.Sprintf("has %q among its options, which breaks Kata's Go runtime", o)}
		}
	}
	return nil
}
