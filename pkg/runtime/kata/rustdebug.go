package kata

import (
	"errors"
	"regexp"
	"strconv"
	"strings"
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

// debugToken is one token: a string, a number, a name (by group), or a sign.
var debugToken = regexp.MustCompile(`^[ \n\t]*(?:("(?:[^"\\]|\\.)*")|(-?[0-9]+(?:\.[0-9]+)*)|([A-Za-z_][A-Za-z0-9_]*)|\.\.|[][(){},:])`)

// debugParser parses Rust's debug text strictly: every byte must belong to the grammar. The
// text comes from a guest, so the depth is bounded. The caller bounds the length and checks
// that it is UTF-8.
type debugParser struct {
	rest string
	// failed is set if the text breaks the grammar. Then nothing is left to read.
	failed bool
}

func (p *debugParser) fail() { p.failed, p.rest = true, "" }

// token consumes the next token. ok is false at the end, and if there is none.
func (p *debugParser) token() (text string, kind valueKind, ok bool) {
	at := debugToken.FindStringSubmatchIndex(p.rest)
	if at == nil {
		return "", 0, false
	}
	text, p.rest = strings.TrimLeft(p.rest[:at[1]], " \n\t"), p.rest[at[1]:]
	switch {
	case at[2] >= 0:
		kind = stringValue
	case at[4] >= 0:
		kind = numberValue
	case at[6] < 0:
		kind = listValue
	}
	return text, kind, true
}

// take consumes the next token if it is the wanted one, and reports whether it is.
func (p *debugParser) take(wanted string) bool {
	before := p.rest
	if text, _, _ := p.token(); text != wanted {
		p.rest = before
		return false
	}
	return true
}

func (p *debugParser) want(tokens ...string) {
	for _, one := range tokens {
		if !p.take(one) {
			p.fail()
		}
	}
}

// atEnd reports whether only space is left.
func (p *debugParser) atEnd() bool { return strings.Trim(p.rest, " \n\t") == "" }

func (p *debugParser) value(depth int) value {
	text, kind, ok := p.token()
	v := value{kind: kind, text: text}
	switch {
	case !ok || depth > maxDepth:
		p.fail()
	case kind == stringValue:
		v.text = p.unquote(text)
	case kind == nameValue && p.take("("):
		v.items = p.items(")", depth)
	case kind == nameValue && p.take("{"):
		v.fields = p.fields(depth)
	case text == "[":
		v.items = p.items("]", depth)
	case text == "(":
		v.items = p.items(")", depth)
	case text == "{":
		p.mapping(depth)
	case kind == listValue:
		p.fail()
	}
	return v
}

// list parses elements up to the closing bracket, with commas between them and perhaps one
// after the last. The opening bracket has been consumed.
func (p *debugParser) list(end string, element func()) {
	for !p.failed && !p.take(end) {
		element()
		if p.take(end) {
			return
		}
		p.want(",")
	}
}

func (p *debugParser) items(end string, depth int) (items []value) {
	p.list(end, func() { items = append(items, p.value(depth+1)) })
	return items
}

func (p *debugParser) fields(depth int) map[string]value {
	fields := make(map[string]value)
	p.list("}", func() {
		name, kind, ok := p.token()
		if name == ".." { // of a type that does not show all
			return
		}
		if _, twice := fields[name]; twice || !ok || kind != nameValue {
			p.fail()
		}
		p.want(":")
		fields[name] = p.value(depth + 1)
	})
	return fields
}

// mapping parses {key: value, ...} and drops it: only fields that we do not use are maps.
func (p *debugParser) mapping(depth int) {
	p.list("}", func() {
		p.value(depth + 1)
		if p.take(":") {
			p.value(depth + 1)
		}
	})
}

var rustEscape = regexp.MustCompile(`\\(?:u\{[0-9A-Fa-f]{1,6}\}|.)`)

// unquote replaces the escapes that only Rust has, and unquotes a string by Go's rules.
func (p *debugParser) unquote(quoted string) string {
	quoted = rustEscape.ReplaceAllStringFunc(quoted, func(escape string) string {
		switch digits, isHex := strings.CutPrefix(escape, `\u{`); {
		case isHex:
			digits = strings.TrimSuffix(digits, "}")
			return `\U` + strings.Repeat("0", 8-len(digits)) + digits
		case escape == `\0`:
			return `\x00`
		case escape == `\'`:
			return `'`
		}
		return escape
	})
	text, err := strconv.Unquote(quoted)
	if err != nil {
		p.fail()
	}
	return text
}
