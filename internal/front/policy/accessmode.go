package policy

import (
	"slices"
	"strings"
)

// accessModes are CSI's names.
var accessModes = []string{
	"SINGLE_NODE_WRITER", "SINGLE_NODE_READER_ONLY", "MULTI_NODE_READER_ONLY", "MULTI_NODE_SINGLE_WRITER",
	"MULTI_NODE_MULTI_WRITER", "SINGLE_NODE_SINGLE_WRITER", "SINGLE_NODE_MULTI_WRITER",
}

// claimModes maps the access modes of Kubernetes' claims to CSI's modes that kubelet sends for them. For
// ReadWriteOnce that depends on the driver: one that reports the capability SINGLE_NODE_MULTI_WRITER gets the mode of
// that name, every other one SINGLE_NODE_WRITER. Those other drivers get SINGLE_NODE_WRITER for ReadWriteOncePod too,
// so that the two claim modes cannot be distinguished there.
var claimModes = map[string][]string{
	"ReadWriteOnce":    {"SINGLE_NODE_WRITER", "SINGLE_NODE_MULTI_WRITER"},
	"ReadWriteOncePod": {"SINGLE_NODE_SINGLE_WRITER"},
	"ReadOnlyMany":     {"MULTI_NODE_READER_ONLY"},
	"ReadWriteMany":    {"MULTI_NODE_MULTI_WRITER"},
}

// ModeOf is CSI's mode for a claim's. The driver reports SINGLE_NODE_MULTI_WRITER, or not.
func ModeOf(claim string, multiWriter bool) string {
	modes := claimModes[claim]
	if len(modes) == 0 || strings.HasPrefix(claim, "ReadWriteOnce") && !multiWriter {
		return "SINGLE_NODE_WRITER"
	}
	return modes[len(modes)-1]
}

func expandModes(words []string) []string {
	modes := make([]string, 0, len(words))
	for _, word := range words {
		if known, ok := claimModes[word]; ok {
			modes = append(modes, known...)
		} else {
			modes = append(modes, word)
		}
	}
	return modes
}

// matchesMode reports whether a rule with this access mode matches a volume of CSI's mode.
// SINGLE_NODE_WRITER in a rule means ReadWriteOnce, whatever the driver reports.
func matchesMode(word, mode string) bool {
	modes := expandModes([]string{word})
	return slices.Contains(modes, mode) || mode == "SINGLE_NODE_MULTI_WRITER" && slices.Contains(modes, "SINGLE_NODE_WRITER")
}

func explainMode(word string) string {
	switch word {
	case "SINGLE_NODE_WRITER":
		return word + " matches ReadWriteOnce with every driver, also with those that get it as SINGLE_NODE_MULTI_WRITER; and " +
			"ReadWriteOncePod with drivers that do not report the capability SINGLE_NODE_MULTI_WRITER"
	case "ReadWriteOnce":
		return word + " matches what kubelet sends for it, SINGLE_NODE_WRITER or SINGLE_NODE_MULTI_WRITER; and " +
			"ReadWriteOncePod with drivers that do not report the capability SINGLE_NODE_MULTI_WRITER"
	case "ReadWriteOncePod":
		return word + " matches SINGLE_NODE_SINGLE_WRITER: drivers that do not report the capability SINGLE_NODE_MULTI_WRITER " +
			"get SINGLE_NODE_WRITER instead, as for ReadWriteOnce, which this rule does not match"
	default:
		if modes, ok := claimModes[word]; ok {
			return word + " matches " + strings.Join(modes, " and ")
		}
		return ""
	}
}
