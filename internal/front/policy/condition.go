package policy

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// What a pod may need of a volume beyond its filesystem: the values of Rule.Needs.
const (
	NeedSubPath = "subPath" // a container mounts a sub-directory of it
	NeedFSGroup = "fsGroup" // its files shall belong to the pod's group
)

// condition is a condition of a rule: what it lists, and what a volume has.
type condition struct {
	key, kind string // in the configuration, and what is listed there
	valid     func(listed string) bool
	list, has []string
	matches   func(listed, has string) bool
	known     bool // false if what the volume has depends on a pod that is not known
}

// ofVolume counts the first conditions, which do not depend on the pod, but for its annotation.
const ofVolume = 4

func (r *Rule) conditions(w *Input) []condition {
	var annotated []string
	if r.Annotated {
		annotated = []string{"true"}
	}
	known := w.PodKnown && w.Missing == nil
	return []condition{
		{"annotated", "", nil, annotated, []string{strconv.FormatBool(w.Annotated)}, equal, true},
		{"drivers", "a CSI driver's name, or one with * in it", ruleDriverForm().MatchString, r.Drivers, []string{w.Driver}, globMatches, true},
		{"filesystems", "a filesystem's name", volume.IsFSType, r.Filesystems, []string{w.FSType}, equal, true},
		{"accessModes", oneOfModes, isMode, r.AccessModes, []string{w.AccessMode}, matchesMode, true},
		{"runtimeHandlers", "a handler of a RuntimeClass", dnsLabelForm().MatchString, r.RuntimeHandlers, []string{w.RuntimeHandler}, equal, w.PodKnown},
		{"namespaces", "a namespace", dnsLabelForm().MatchString, r.Namespaces, []string{w.Namespace}, equal, w.PodKnown},
		{"storageClasses", "a StorageClass's name", classForm().MatchString, r.StorageClasses, []string{w.StorageClass}, equal, known},
		{"needs", "one of fsGroup, subPath", isNeed, r.Needs, w.Needs, equal, known},
	}
}

var (
	modeNames  = append(slices.Sorted(maps.Keys(claimModes)), accessModes...)
	oneOfModes = "one of " + strings.Join(modeNames, ", ")
	isMode     = in(modeNames)
	isNeed     = in([]string{NeedFSGroup, NeedSubPath})
)

func in(list []string) func(string) bool {
	return func(s string) bool { return slices.Contains(list, s) }
}

func (c condition) unmet() bool {
	return c.known && len(c.list) > 0 && !slices.ContainsFunc(c.list, func(listed string) bool {
		return slices.ContainsFunc(c.has, func(has string) bool { return c.matches(listed, has) })
	})
}

// String explains a condition that is not met.
func (c condition) String() string {
	return c.key + ": it has " + cmp.Or(sys.Clip(strings.Join(c.has, " and ")), "none") + ", and the rule wants " + strings.Join(c.list, " or ")
}

// mismatch returns why a rule does not match: the first condition that the volume does not meet, else
// the first that is not known. A guess could hand a volume to a sandbox that another pod expects on the
// host. It returns nil if the rule matches.
func (r *Rule) mismatch(w *Input) (open *condition) {
	for _, c := range r.conditions(w) {
		if c.unmet() {
			return &c
		}
		if open == nil && len(c.list) > 0 && !c.known {
			open = &c
		}
	}
	return open
}

func (r *Rule) matchesVolume(w *Input) bool {
	return !slices.ContainsFunc(r.conditions(w)[:ofVolume], condition.unmet)
}

// ByPod returns the keys of the rule's conditions that depend on the pod, without its annotation.
func (r *Rule) ByPod() (keys []string) {
	for _, c := range r.conditions(&Input{})[ofVolume:] {
		if len(c.list) > 0 {
			keys = append(keys, c.key)
		}
	}
	return keys
}

func (w *Input) undecidable(r *Rule, by *condition, what, advice string) error {
	text := "the policy's rule %q cannot be decided for this volume of driver %s" + what + ": it goes by " + by.key
	if w.PodKnown {
		return volume.Errorf(volume.KindOf(w.Missing), text+", and %w", r.Name, sys.Clip(w.Driver), w.Missing)
	}
	return volume.Errorf(volume.Unsupported, text+" of the pod, which is not known here: "+advice, r.Name, sys.Clip(w.Driver))
}

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
