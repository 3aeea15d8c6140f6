"""The Chinese words of the news: event kinds, what stands around them, and questions.

``news`` draws the slots and puts items together.

    WORDING.kinds[0].highlight
"""

from __future__ import annotations

from recipes.world.news_kind import Kind, Wording

_OPENING = Kind(
    name="opening",
    lists={"thing": ("图书馆", "博物馆", "游泳馆", "体育馆", "剧院", "医院", "菜市场")},
    numbers=(40, 990),
    lead=(
        "{place}的新{thing}正式开放了。",
        "{place}终于有了自己的{thing}。",
        "一座新的{thing}在{place}建成。",
    ),
    facts=(
        ("{role}{who}为它剪了彩。", "剪彩的人是{role}{who}。"),
        ("开放仪式在{day}举行。", "第一批客人在{day}走了进去。"),
        ("里面可以容纳{n}人。", "它一次能接待{n}人。"),
    ),
    highlight="{day}，{who}在{place}为可容纳{n}人的{thing}剪彩。",
    questions=(
        (("谁剪了彩？", "为{thing}剪彩的是谁？"), "who"),
        (("新开放的是什么？", "建成的是什么？"), "thing"),
        (("里面能容纳多少人？", "它一次能接待多少人？"), "n"),
    ),
    extras=("工程用了{m}个月。", "花的钱比计划的少。"),
)
_FIRE = Kind(
    name="fire",
    lists={"thing": ("面包店", "仓库", "学校", "旅馆", "造纸厂", "商店", "饭店")},
    numbers=(3, 60),
    lead=(
        "{place}一家{thing}发生了火灾。",
        "{place}上空升起浓烟，一家{thing}着火了。",
        "大火烧毁了{place}一家{thing}。",
    ),
    facts=(
        ("消防员救出了{n}人。", "有{n}人被带到安全的地方。"),
        ("最先发现火情的是{role}{who}。", "住在附近的{role}{who}报了警。"),
        ("火是{day}夜里烧起来的。", "事情发生在{day}清晨。"),
    ),
    highlight="{day}，{place}的{thing}起火，{who}报警后{n}人获救。",
    questions=(
        (("谁报了警？", "谁最先发现火情？"), "who"),
        (("什么地方着火了？", "哪种建筑起火？"), "thing"),
        (("救出了多少人？", "有多少人获救？"), "n"),
    ),
    extras=("没有人受伤。", "屋顶需要重新修建。"),
)
_MATCH = Kind(
    name="match",
    lists={"thing": ("足球", "排球", "篮球", "曲棍球", "手球", "乒乓球")},
    numbers=(2, 30),
    lead=(
        "{place}{thing}队战胜了{place2}队。",
        "一场{thing}比赛让{place}的人们高兴不已，他们赢了{place2}队。",
    ),
    facts=(
        ("{who}一个人拿下{n}分。", "其中{n}分来自{who}。"),
        ("比赛在{day}进行。", "两队在{day}相遇。"),
        ("教练表扬了防守。", "下半场下起了小雨。", "看台上坐满了人。"),
    ),
    highlight="{day}，{who}得到{n}分，{place}在{thing}比赛中击败{place2}。",
    questions=(
        (("谁得了分？", "文中提到的球员是谁？"), "who"),
        (("谁输了比赛？", "哪个地方的队输了？"), "place2"),
        (("这是什么比赛？", "他们打的是什么球？"), "thing"),
        (("{who}得了多少分？",), "n"),
    ),
)
_ELECTION = Kind(
    name="election",
    lists={"thing": ("镇长", "议会主席", "法官", "校长", "港务长")},
    numbers=(120, 990),
    lead=("{place}的居民选出了新的{thing}。", "{place}的{thing}选举有了结果。"),
    facts=(
        ("{who}得到{n}票，赢得选举。", "获胜的是得到{n}票的{who}。"),
        ("投票在{day}进行。", "居民们在{day}去投票。"),
        ("另一位候选人是{who2}。", "{who2}排在第二位，并送上祝福。"),
    ),
    highlight="{day}，{who}以{n}票战胜{who2}，当选{place}的{thing}。",
    questions=(
        (("谁赢了选举？", "谁当选了？"), "who"),
        (("谁排在第二位？", "谁落选了？"), "who2"),
        (("获胜者得到多少票？", "多少票赢得了选举？"), "n"),
        (("选的是什么职位？",), "thing"),
    ),
)
_STORM = Kind(
    name="storm",
    lists={"thing": ("暴风雨", "洪水", "大雪", "高温", "冰雹")},
    numbers=(20, 900),
    lead=(
        "{thing}袭击了{place}。",
        "{thing}过后，{place}的生活还没有恢复正常。",
        "{place}正在统计{thing}造成的损失。",
    ),
    facts=(
        ("有{n}户人家停了电。", "{n}户人家的灯灭了。"),
        ("{day}的情况最严重。", "它在{day}到达这里。"),
        ("{role}{who}带领大家救援。", "救援队由{role}{who}带领。"),
    ),
    highlight="{day}，{thing}使{place}{n}户人家停电，{who}负责救援。",
    questions=(
        (("谁带领大家救援？", "救援由谁负责？"), "who"),
        (("袭击这里的是什么？", "这是什么天气？"), "thing"),
        (("多少户人家停了电？", "有多少户没有电？"), "n"),
    ),
    extras=("几条道路被关闭。", "学校停课{m}天。"),
)
_FIND = Kind(
    name="find",
    lists={"thing": ("古币", "石斧", "船钟", "鲸骨", "陶罐", "金戒指")},
    numbers=(120, 990),
    lead=("{place}附近出土了一件{thing}。", "专家正在研究{place}附近发现的{thing}。"),
    facts=(
        ("它大约有{n}年的历史。", "专家说它已经有{n}年了。"),
        ("{role}{who}偶然看到了它。", "把它挖出来的是{role}{who}。"),
        ("发现的日子是{day}。", "它在{day}被发现。"),
    ),
    highlight="{day}，{who}在{place}附近发现了{n}年前的{thing}。",
    questions=(
        (("谁发现了{thing}？", "是谁发现的？"), "who"),
        (("发现了什么？", "出土的是什么？"), "thing"),
        (("它有多少年的历史？", "{thing}有多少年了？"), "n"),
    ),
    extras=("它将在博物馆展出。", "人们还打算继续挖掘。"),
)
_PRIZE = Kind(
    name="prize",
    lists={"thing": ("小说", "歌曲", "油画", "电影", "蛋糕", "花园", "诗歌")},
    numbers=(100, 990),
    lead=("{place}颁发了年度最佳{thing}奖。", "{place}的评委选出了今年最好的{thing}。"),
    facts=(
        ("获奖的是{role}{who}。", "作者是{role}{who}。"),
        ("奖金是{n}元。", "获奖者得到{n}元。"),
        ("颁奖晚会在{day}举行。", "结果在{day}公布。"),
    ),
    highlight="{day}，{who}凭最佳{thing}在{place}获得{n}元奖金。",
    questions=(
        (("谁获了奖？", "获奖的是谁？"), "who"),
        (("这个奖是颁给什么的？", "获奖的作品是什么？"), "thing"),
        (("奖金是多少元？", "获奖者得到多少元？"), "n"),
    ),
)
_FACTORY = Kind(
    name="factory",
    lists={"thing": ("自行车", "椅子", "收音机", "台灯", "小船", "钟表", "皮鞋")},
    numbers=(20, 950),
    lead=("一家生产{thing}的工厂将落户{place}。", "{place}有好消息：这里要生产{thing}了。"),
    facts=(
        ("工厂带来{n}个工作岗位。", "将有{n}人在那里工作。"),
        ("计划是{role}{who}提出的。", "提出计划的人是{role}{who}。"),
        ("{day}开始生产。", "工厂的大门将在{day}打开。"),
    ),
    highlight="从{day}起，{who}的{thing}工厂将为{place}提供{n}个岗位。",
    questions=(
        (("谁提出了计划？", "这是谁的计划？"), "who"),
        (("工厂生产什么？", "这里要生产什么？"), "thing"),
        (("有多少个工作岗位？", "将有多少人在那里工作？"), "n"),
    ),
    extras=("议会讨论了很久才同意。", "厂房长{m}米。"),
)
_ANIMAL = Kind(
    name="animal",
    lists={"thing": ("小狗", "白马", "山羊", "鹦鹉", "花猫", "毛驴", "乌龟")},
    numbers=(2, 40),
    lead=("在{place}走丢的{thing}回家了。", "失踪的{thing}在{place}出现了。"),
    facts=(
        ("它离开家已经{n}天。", "人们找了{n}天。"),
        ("{role}{who}在小屋后面找到了它。", "找到它的是{role}{who}。"),
        ("它是{day}被找到的。", "好消息是{day}传来的。"),
    ),
    highlight="{day}，{who}在{place}找到了失踪{n}天的{thing}。",
    questions=(
        (("谁找到了{thing}？", "谁找到了它？"), "who"),
        (("走丢的是什么动物？", "失踪的是什么？"), "thing"),
        (("它失踪了多少天？", "人们找了多少天？"), "n"),
    ),
    extras=("它很饿，但是很健康。", "它的主人是{who2}。"),
)
_STUDY = Kind(
    name="study",
    lists={"thing": ("睡眠", "蜜蜂", "古树", "面包", "河流", "音乐课", "蜗牛")},
    numbers=(30, 990),
    lead=("{place}的研究人员发表了关于{thing}的研究。", "一项关于{thing}的研究来自{place}。"),
    facts=(
        ("研究由{who}主持。", "{who}负责这项研究。"),
        ("他们检查了{n}个样本。", "研究用了{n}个样本。"),
        ("结果在{day}公布。", "它在{day}发表。"),
    ),
    highlight="{day}，{who}在{place}公布了基于{n}个样本的{thing}研究。",
    questions=(
        (("谁主持研究？", "研究由谁负责？"), "who"),
        (("研究的是什么？", "这项研究是关于什么的？"), "thing"),
        (("用了多少个样本？", "他们检查了多少个样本？"), "n"),
    ),
    extras=("其他人说结果令人吃惊。", "研究用了{m}个月。"),
)
_FESTIVAL = Kind(
    name="festival",
    lists={"thing": ("灯笼节", "奶酪节", "风筝节", "音乐节", "木偶节", "苹果节", "读书节")},
    numbers=(100, 990),
    lead=("{place}的{thing}结束了。", "{place}庆祝了一年一度的{thing}。"),
    facts=(
        ("来了{n}位客人。", "主办方数到了{n}位客人。"),
        ("活动在{day}举行。", "日子和往年一样，定在{day}。"),
        ("{role}{who}在开幕时讲了话。", "开幕讲话的是{role}{who}。"),
    ),
    highlight="{day}，{n}位客人参加了{who}在{place}开幕的{thing}。",
    questions=(
        (("谁在开幕时讲了话？", "开幕讲话的是谁？"), "who"),
        (("这是什么节？", "举行的是什么节？"), "thing"),
        (("来了多少位客人？", "有多少位客人？"), "n"),
    ),
    extras=("音乐一直响到半夜。", "一整天都是好天气。"),
)
_RECORD = Kind(
    name="record",
    lists={"thing": ("游", "骑", "走", "划", "滑", "跑")},
    numbers=(50, 990),
    lead=("{place}诞生了一项新纪录。", "{place}为一项新纪录感到骄傲。"),
    facts=(
        ("{role}{who}{thing}了{n}公里。", "{n}公里，这是{role}{who}{thing}完的路程。"),
        ("最后一段在{day}完成。", "{day}到达了终点。"),
        ("旧纪录保持了{m}年。", "人们为此努力了{m}年。"),
    ),
    highlight="{day}，{who}在{place}{thing}完{n}公里，创下纪录。",
    questions=(
        (("谁创下了纪录？", "现在的纪录属于谁？"), "who"),
        (("一共多少公里？", "纪录是多少公里？"), "n"),
    ),
)

WORDING = Wording(
    kinds=(
        _OPENING,
        _FIRE,
        _MATCH,
        _ELECTION,
        _STORM,
        _FIND,
        _PRIZE,
        _FACTORY,
        _ANIMAL,
        _STUDY,
        _FESTIVAL,
        _RECORD,
    ),
    openers=(
        "这是本周大家谈论最多的事。",
        "下面是本地的最新消息。",
        "本报记者来到了现场。",
        "这样的新闻不是每天都有。",
    ),
    extras=(
        ("“我会一直记得这一天。”{who3}说。", ("谁会一直记得这一天？",), "who3"),
        ("“大家都在谈这件事。”邻居{who3}说。", ("邻居是谁？",), "who3"),
        ("当天的天气是{weather}。", ("当天天气怎么样？", "那天是什么天气？"), "weather"),
        ("报纸登了{m}张照片。", ("报纸登了多少张照片？",), "m"),
        ("还有从{place3}来的客人。", ("还有客人从哪里来？",), "place3"),
        ("这样的事已经{m}年没有发生了。", (), ""),
        ("在这里住了{k}年的{who4}感到很惊讶。", ("谁感到很惊讶？", "谁在这里住了{k}年？"), "who4"),
        ("晚上的广播首先播出了{who5}的报道。", ("广播里是谁的报道？",), "who5"),
        ("早上{k}点，一辆载着客人的汽车从{place4}开出。", ("汽车从哪里开出？",), "place4"),
        ("学校的孩子们为此画了{j}幅画。", ("孩子们画了多少幅画？",), "j"),
        ("最后大家一起喝茶、吃点心。", (), ""),
        ("下周会有更多消息。", (), ""),
        ("议会很快会讨论这件事。", (), ""),
    ),
    lists={
        "role": ("教师", "面包师", "医生", "农民", "护士", "画家", "司机", "学生", "飞行员"),
        "weather": ("晴天", "阴天", "大风", "小雨", "大雾", "雨夹雪"),
    },
    questions=(
        (("这件事发生在哪里？", "这篇文章说的是哪个地方？"), "place"),
        (("这件事发生在什么时候？", "这是哪一天的事？"), "day"),
    ),
    joiner="",
)
