// Package show formats what the daemon reports for people: sizes, times, states, and text that cannot harm a terminal.
package show

import (
	"cmp"
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Escape makes text safe for a terminal. Condition messages come from a guest and paths from other programs: they must
// not move the cursor, set a window's title, hide text or end a table's row.
func Escape(text string) string { return escape(text, Unsafe) }

// EscapeLines keeps line feeds, for our own texts of several lines. At worst, text from
// the daemon in them starts a new line.
func EscapeLines(text string) string {
	return escape(text, func(r rune) bool { return r != '\n' && Unsafe(r) })
}

// EscapeCell is for a screen that is drawn cell by cell. It also escapes combining
// characters, whose widths differ between terminals.
func EscapeCell(text string) string {
	return escape(text, func(r rune) bool { return Unsafe(r) || unicode.Is(unicode.M, r) })
}

// EscapeASCII is EscapeCell for a terminal without Unicode.
func EscapeASCII(text string) string {
	return escape(text, func(r rune) bool { return r > unicode.MaxASCII || Unsafe(r) })
}

func escape(text string, harmful func(rune) bool) string {
	if strings.IndexFunc(text, harmful) < 0 {
		return text
	}
	var b strings.Builder
	for len(text) > 0 {
		r, width := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && width == 1:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		case harmful(r):
			b.WriteString(escapeRune(r))
		default:
			b.WriteString(text[:width])
		}
		text = text[width:]
	}
	return b.String()
}

func escapeRune(r rune) string {
	switch {
	case r == '\n':
		return `\n`
	case r == '\t':
		return `\t`
	case r == '\r':
		return `\r`
	case r < 0x100:
		return fmt.Sprintf(`\x%02x`, r)
	case r < 0x10000:
		return fmt.Sprintf(`\u%04x`, r)
	}
	return fmt.Sprintf(`\U%08x`, r)
}

// Unsafe reports whether a character is not plainly visible.
func Unsafe(r rune) bool { return !sys.IsPrintable(r) || r == utf8.RuneError }

// EscapeJSON escapes the characters that JSON allows unescaped and that control a terminal: C1 controls, DEL,
// directional overrides. They occur only inside strings, so a program reads the same text.
func EscapeJSON(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for len(text) > 0 {
		r, width := utf8.DecodeRune(text)
		if r < 0x7f || !Unsafe(r) || r == utf8.RuneError {
			out = append(out, text[:width]...)
		} else {
			for _, unit := range utf16.AppendRune(nil, r) {
				out = fmt.Appendf(out, `\u%04x`, unit)
			}
		}
		text = text[width:]
	}
	return out
}

// Size shows bytes with a binary unit: 1.5GiB.
func Size(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%dB", n)
	}
	value, unit := float64(n), -1
	// 1023.95 and more would be shown as 1024.0 of a unit.
	for value >= 1023.95 && unit < 5 {
		value, unit = value/1024, unit+1
	}
	return strings.Replace(fmt.Sprintf("%.1f%ciB", value, "KMGTPE"[unit]), ".0", "", 1)
}

// ShortIDLength is how much of an id is shown to people.
const ShortIDLength = 12

// ShortID is the part of an id that is shown to people.
func ShortID(id string) string { return id[:min(len(id), ShortIDLength)] }

// When returns a value if the condition is true, else its type's zero value.
func When[T any](is bool, value T) (none T) { return Either(is, value, none) }

// Either returns one of two values.
func Either[T any](is bool, yes, no T) T {
	if is {
		return yes
	}
	return no
}

// Joined joins the texts that are not empty.
func Joined(separator string, texts ...string) string {
	return strings.Join(slices.DeleteFunc(texts, func(text string) bool { return text == "" }), separator)
}

// Count is a number of things: "1 node", "2 nodes".
func Count(n int, thing string) string { return fmt.Sprintf("%d %s", n, thing) + When(n != 1, "s") }

// WithDetail adds a detail in brackets, if there is one.
func WithDetail(what, detail string) string {
	return Joined(" ", what, When(detail != "", "("+detail+")"))
}

// Percent is the used part of a total, rounded up, so that it is 0% only if nothing is used.
// Without a total it is empty.
func Percent(used, total int64) string {
	if total <= 0 {
		return ""
	}
	return fmt.Sprintf("%.0f%%", math.Ceil(100*float64(used)/float64(total)))
}

// Duration formats how long ago something was, as kubectl does: coarser as it grows. It is 0s
// if our clock is behind the daemon's.
func Duration(d time.Duration) string { return duration.HumanDuration(max(0, d)) }

// Colours and attributes: the terminal's own sixteen, so that the user's palette applies.
const (
	Plain   = ""
	Red     = "\x1b[31m"
	Green   = "\x1b[32m"
	Yellow  = "\x1b[33m"
	Cyan    = "\x1b[36m"
	Faint   = "\x1b[2m"
	Bold    = "\x1b[1m"
	Reverse = "\x1b[7m"
	Alarm   = "\x1b[1;31m"
	Reset   = "\x1b[0m"
)

// StateName is the name of a volume's state; a volume that is gone has none.
func StateName(s adminv1.VolumeState) string {
	return When(s != adminv1.VolumeState_VOLUME_STATE_UNSPECIFIED, strings.TrimPrefix(s.String(), "VOLUME_STATE_"))
}

// StateNames are the states' names as users write them.
func StateNames() (names []string) {
	for n := int32(1); adminv1.VolumeState_name[n] != ""; n++ {
		names = append(names, strings.ToLower(StateName(adminv1.VolumeState(n))))
	}
	return names
}

// CheckStates checks the values of --state.
func CheckStates(states ...string) error {
	for _, state := range states {
		if !slices.Contains(StateNames(), strings.ToLower(state)) {
			return fmt.Errorf("--state %q is none of %s", state, strings.Join(StateNames(), ", "))
		}
	}
	return nil
}

// Pod names the pod of a volume, by its UID if its name is not known.
func Pod(v *adminv1.Volume) string {
	return Either(v.GetPodName() != "", v.GetPodNamespace()+"/"+v.GetPodName(), v.GetPodUid())
}

// podDigits is how much of a pod's UID is shown where its name is not known. crustctl takes it for a name.
const podDigits = 8

// ShortPod is Pod for a column.
func ShortPod(v *adminv1.Volume) string {
	return Either(v.GetPodName() != "", Pod(v), v.GetPodUid()[:min(len(v.GetPodUid()), podDigits)])
}

// VolumeName names a volume by its claim, if that is known, else by its PersistentVolume, and else
// by the driver's id or the last part of the path.
func VolumeName(v *adminv1.Volume) string {
	return cmp.Or(v.GetPvcName(), kubelet.VolumeName(v.GetTargetPath()), v.GetVolumeId(), path.Base(v.GetTargetPath()))
}

var stateColours = map[adminv1.VolumeState]string{
	adminv1.VolumeState_VOLUME_STATE_BOUND:    Green,
	adminv1.VolumeState_VOLUME_STATE_DEGRADED: Red,
	adminv1.VolumeState_VOLUME_STATE_REFUSED:  Red,
	adminv1.VolumeState_VOLUME_STATE_HELD:     Red,
	adminv1.VolumeState_VOLUME_STATE_REMOVING: Yellow,
	adminv1.VolumeState_VOLUME_STATE_ADOPTED:  Faint,
}

// StateColour is the colour of a volume's state; other states are plain.
func StateColour(s adminv1.VolumeState) string { return stateColours[s] }

// Usage is one measure of a volume's filesystem; nil is unknown.
func Usage(v *adminv1.Volume, unit adminv1.VolumeUsage_Unit) *adminv1.VolumeUsage {
	for _, u := range v.GetUsage() {
		if u.GetUnit() == unit {
			return u
		}
	}
	return nil
}
