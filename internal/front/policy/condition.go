package policy

import (
	"cmp"
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

// condition is a condition of a rule, and what a volume has instead.
type condition struct {
	key       string
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
		{"annotated", annotated, []string{strconv.FormatBool(w.Annotated)}, equal, true},
		{"drivers", r.Drivers, []string{w.Driver}, globMatches, true},
		{"filesystems", r.Filesystems, []string{w.FSType}, equal, true},
		{"accessModes", r.AccessModes, []string{w.AccessMode}, matchesMode, true},
		{"runtimeHandlers", r.RuntimeHandlers, []string{w.RuntimeHandler}, equal, w.PodKnown},
		{"namespaces", r.Namespaces, []string{w.Namespace}, equal, w.PodKnown},
		{"storageClasses", r.StorageClasses, []string{w.StorageClass}, equal, known},
		{"needs", r.Needs, w.Needs, equal, known},
	}
}

func (c condition) open() bool { return len(c.list) > 0 && !c.known }

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
func (r *Rule) mismatch(w *Input) *condition {
	all := r.conditions(w)
	i := slices.IndexFunc(all, condition.unmet)
	if i < 0 {
		i = slices.IndexFunc(all, condition.open)
	}
	if i < 0 {
		return nil
	}
	return &all[i]
}

// matchesVolume reports whether the rule matches the volume for some pod.
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

// undecidable is the error of a rule that decides by what is not known of a volume.
func (w *Input) undecidable(r *Rule, key string) error {
	advice := "say " + ContextKey + ": \"true\" or \"false\" in the volume's attributes, "
	if w.Inline {
		advice = "" // those are the pod author's
	}
	return w.unknown(key, "the policy's rule %q cannot be decided for this volume of driver %s", "configure cluster so that it is, "+advice+
		"or take "+key+" out of the rule", r.Name, sys.Clip(w.Driver))
}

// howUndecidable is that of a rule which decides how a volume is deferred.
func (w *Input) howUndecidable(r *Rule, key, word string) error {
	return w.unknown(key, "this volume of driver %s is to be deferred (%s), and how cannot be decided by the policy's rule %q",
		"take "+key+" out of the rule, or handler, format, mkfsOptions, rootMode and grow", sys.Clip(w.Driver), word, r.Name)
}

func (w *Input) unknown(key, format, advice string, args ...any) error {
	if w.PodKnown {
		return volume.Errorf(volume.KindOf(w.Missing), format+": it goes by "+key+", and %w", append(args, w.Missing)...)
	}
	return volume.Errorf(volume.Unsupported, format+": it goes by "+key+" of the pod, which is not known here: "+advice, args...)
}
