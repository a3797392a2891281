package policy

import (
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// AnnotationKey is the annotation by which a pod asks for its volumes to be deferred: their
// names in the pod, separated by commas, or "*".
const AnnotationKey = "crust-proxy.dev/defer"

// The bounds of an annotation, which anybody who may create a pod can write.
const (
	MaxAnnotation = 8 << 10
	maxAskedNames = 64
)

// dnsLabelForm is the form of a volume's name in a pod, and of a RuntimeClass's handler.
var dnsLabelForm = sys.LazyRegexp(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// Asked is what a pod's annotation asks for. The zero value asks for nothing.
type Asked struct {
	All   bool // "*"
	Names []string
}

// ParseAnnotation parses the value of AnnotationKey. An empty value asks for nothing, as a missing annotation does.
func ParseAnnotation(value string) (Asked, error) {
	if value == "" {
		return Asked{}, nil
	}
	if len(value) > MaxAnnotation {
		return Asked{}, badAnnotation("it has %d bytes, and %d are taken", len(value), MaxAnnotation)
	}
	parts := strings.Split(value, ",")
	if len(parts) > maxAskedNames {
		return Asked{}, badAnnotation("it names %d volumes, and %d are taken", len(parts), maxAskedNames)
	}
	var out Asked
	for _, part := range parts {
		switch name := strings.Trim(part, " "); {
		case name == "*" && len(parts) == 1:
			out.All = true
		case dnsLabelForm().MatchString(name):
			out.Names = append(out.Names, name)
		default:
			return Asked{}, badAnnotation("%q is no volume's name", sys.Clip(name))
		}
	}
	return out, nil
}

func badAnnotation(format string, args ...any) error {
	return volume.Errorf(volume.Invalid, "the pod's annotation %s cannot be read ("+format+"): write the names of volumes with commas between, or * alone",
		append([]any{AnnotationKey}, args...)...)
}

// Asks reports whether a volume of the pod is asked for.
func (a Asked) Asks(volume string) bool { return a.All || slices.Contains(a.Names, volume) }

// Nothing reports whether nothing is asked for.
func (a Asked) Nothing() bool { return !a.All && len(a.Names) == 0 }
