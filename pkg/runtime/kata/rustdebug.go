package kata

import (
	"errors"
	"strconv"
	"strings"
	"unicode/utf8"
)

// value is one value of Rust's derived Debug text: a name with what follows it,
// a number, a string, or a list.
type value struct {
	kind   valueKind
	text   string           // the name, the number's digits, or the string
	fields map[string]value // of Name { field: value, ... }
	items  []value          // of [ ... ] and Name( ... )
}

type valueKind uint8

const (
	nameValue valueKind = iota
	numberValue
	stringValue
	listValue
)

const maxDepth = 16

var errDebugText = errors.New("it is not the debug text of stats")

// debugParser reads Rust's debug text, strictly: every byte belongs to the
// grammar. The text comes from a guest, so depth is bounded, and the length is
// by the caller.
type debugParser struct {
	rest string
	// failed is set where the text breaks the grammar. Nothing is left to read then.
	failed bool
}

func (p *debugParser) fail() { p.failed, p.rest = true, "" }

// take takes exactly s, if that comes next.
func (p *debugParser) take(s string) (taken bool) {
	p.rest, taken = strings.CutPrefix(strings.TrimLeft(p.rest, " \n\t"), s)
	return taken
}

func (p *debugParser) want(s string) {
	if !p.take(s) {
		p.fail()
	}
}

// next is the first byte of what comes, 0 at the end.
func (p *debugParser) next() byte {
	if p.take(""); p.rest == "" {
		return 0
	}
	return p.rest[0]
}

func (p *debugParser) value(depth int) value {
	switch c := p.next(); {
	case depth > maxDepth:
	case c == '"':
		return value{kind: stringValue, text: p.string()}
	case c == '[':
		return value{kind: listValue, items: p.items("[", "]", depth)}
	case c == '(':
		return value{kind: listValue, items: p.items("(", ")", depth)}
	case c == '{':
		p.mapping(depth)
		return value{kind: listValue}
	case c == '-', isDigit(c):
		return p.number()
	case isNameStart(c):
		return p.named(depth)
	}
	p.fail()
	return value{}
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

func isNameStart(c byte) bool {
	return c == '_' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

func (p *debugParser) cut(n int) (text string) {
	text, p.rest = p.rest[:n], p.rest[n:]
	return text
}

// number takes digits with an optional sign and fraction.
func (p *debugParser) number() value {
	n := 1
	for n < len(p.rest) && (isDigit(p.rest[n]) || p.rest[n] == '.' && n+1 < len(p.rest) && isDigit(p.rest[n+1])) {
		n++
	}
	text := p.cut(n)
	if text == "-" || p.rest != "" && isNameStart(p.rest[0]) {
		p.fail()
	}
	return value{kind: numberValue, text: text}
}

func (p *debugParser) name() string {
	if !isNameStart(p.next()) {
		p.fail()
		return ""
	}
	n := 1
	for n < len(p.rest) && (isNameStart(p.rest[n]) || isDigit(p.rest[n])) {
		n++
	}
	return p.cut(n)
}

func (p *debugParser) named(depth int) value {
	v := value{kind: nameValue, text: p.name()}
	switch p.next() {
	case '(':
		v.items = p.items("(", ")", depth)
	case '{':
		v.fields = p.fields(depth)
	}
	return v
}

// list takes what stands between brackets, with commas between the elements, and with or
// without one at its end.
func (p *debugParser) list(open, end string, element func()) {
	p.want(open)
	for !p.failed && !p.take(end) {
		element()
		if p.next() != end[0] {
			p.want(",")
		}
	}
}

func (p *debugParser) items(open, end string, depth int) (items []value) {
	p.list(open, end, func() { items = append(items, p.value(depth+1)) })
	return items
}

func (p *debugParser) fields(depth int) map[string]value {
	fields := make(map[string]value)
	p.list("{", "}", func() {
		if p.take("..") { // of a type that does not show all
			if p.next() != '}' {
				p.fail()
			}
			return
		}
		name := p.name()
		if _, twice := fields[name]; twice {
			p.fail()
		}
		p.want(":")
		fields[name] = p.value(depth + 1)
	})
	return fields
}

// mapping takes {key: value, ...} and keeps nothing of it: only fields that we
// do not read are maps.
func (p *debugParser) mapping(depth int) {
	p.list("{", "}", func() {
		p.value(depth + 1)
		if p.take(":") {
			p.value(depth + 1)
		}
	})
}

// string takes a quoted string with Rust's escapes.
func (p *debugParser) string() string {
	var out strings.Builder
	p.want(`"`)
	for {
		n := strings.IndexAny(p.rest, `"\`)
		if n < 0 || !utf8.ValidString(p.rest[:n]) {
			p.fail()
			return ""
		}
		out.WriteString(p.cut(n))
		if p.rest[0] == '"' {
			p.cut(1)
			return out.String()
		}
		r, size := unescapeRust(p.rest)
		if size == 0 {
			p.fail()
			return ""
		}
		out.WriteRune(r)
		p.cut(size)
	}
}

var escapes = map[byte]rune{'n': '\n', 'r': '\r', 't': '\t', '0': 0, '\\': '\\', '"': '"', '\'': '\''}

// unescapeRust reads one escape, which begins with a backslash, and its length. That is
// 0 for one that Rust does not write.
func unescapeRust(s string) (rune, int) {
	if len(s) < 2 {
		return 0, 0
	}
	if r, ok := escapes[s[1]]; ok {
		return r, 2
	}
	end := strings.IndexByte(s, '}')
	if end < len(`\u{0`) || end > len(`\u{10ffff`) || !strings.HasPrefix(s, `\u{`) {
		return 0, 0
	}
	n, err := strconv.ParseUint(s[3:end], 16, 32)
	if err != nil || n > utf8.MaxRune || !utf8.ValidRune(rune(n)) {
		return 0, 0
	}
	return rune(n), end + 1
}
